"""The programs of ggmlR's vignette and reference page: an iris classifier, a bare matrix, a loader's loop.

python examples/ported/from_ggmlr.py
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.compat.ggmlr import ArrayLoader, device_count, dp_train

with (Path(__file__).parents[1] / "iris.csv").open(newline="") as file:
    _, *rows = csv.reader(file)
measured = torch.tensor([[float(value) for value in row[:4]] for row in rows])
x = (measured - measured.mean(0)) / measured.std(0)  # x_cm <- scale(...): samples are rows here
species = sorted({row[4] for row in rows})
y = torch.tensor([species.index(row[4]) for row in rows])
dp_data = [{"x": x[i], "y": y[i]} for i in torch.randperm(150, generator=torch.Generator().manual_seed(42)).tolist()]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))


def train(**settings: object) -> pl.compat.ggmlr.DpResult:
    return dp_train(
        make_model,
        dp_data,
        loss_fn=F.cross_entropy,
        forward_fn=lambda model, s: model(s["x"]),
        target_fn=lambda s: s["y"],
        n_iter=600,
        lr=1e-2,
        verbose=False,
        **settings,
    )


class Matrix:
    """The bare 2 x 2 matrix of the reference page: an object with forward and parameters."""

    def __init__(self) -> None:
        self.W = torch.randn(2, 2, requires_grad=True)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        return self.W @ sample

    def parameters(self) -> dict[str, torch.Tensor]:
        return {"W": self.W}


def loader_loop() -> float:
    dl = ArrayLoader(x[:120], y[:120], batch_size=32, shuffle=True)
    model = make_model()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        for batch in dl.epoch():
            loss = F.cross_entropy(model(batch.x), batch.y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return loss.item()


def main() -> int:
    plain = train(n_gpu=1)
    print("final loss:", plain.loss)
    clipped = train(n_gpu=max(1, device_count()), max_norm=5.0)
    samples = [torch.randn(2, 1) for _ in range(8)]
    matrix = dp_train(Matrix, samples, loss_fn=F.mse_loss, target_fn=lambda s: s, n_gpu=1, n_iter=10, verbose=False)
    is_learned = all(sum(r.loss_history[-50:]) < 0.5 * sum(r.loss_history[:50]) for r in (plain, clipped))
    return 0 if is_learned and len(matrix.loss_history) == 10 and loader_loop() < 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
