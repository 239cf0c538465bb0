"""Train an object that is no `nn.Module`: one 2x2 matrix, found by gradient descent to be the identity.

Shows the least that `dp_train` asks of a model: `forward(x)`, and `parameters()` giving tensors, here by name. A
sample is its own target, since no `target_fn` says otherwise.

    python examples/dp_train_matrix.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import paceline as pl


class Matrix:
    def __init__(self) -> None:
        self.weight = torch.randn(2, 2, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x

    def parameters(self) -> dict[str, torch.Tensor]:
        return {"W": self.weight}


def main() -> int:
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randn(2, 1, generator=generator) for _ in range(8)]

    result = pl.dp_train(Matrix, columns, loss_fn=F.mse_loss, n_gpu=1, n_iter=1000, lr=1e-2, verbose=200)

    learned = result.params["W"].detach().cpu()
    print(f"loss {result.loss_history[0]:.4f} -> {result.loss:.2e}, W = {learned.tolist()}")
    return 0 if torch.allclose(learned, torch.eye(2), atol=1e-2) else 1


if __name__ == "__main__":
    sys.exit(main())
