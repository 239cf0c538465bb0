"""Your own loop over arrays: 120 rows in batches of 32, 100 epochs.

Shows `Trainer.setup` over NumPy arrays. 120 rows make four steps per epoch, of 32, 32, 32 and 24 rows: the order is
new in every epoch and no row is dropped. The 30 rows set aside are for the evaluation.

    python examples/array_loader_loop.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from iris import load_iris
from torch import nn

import paceline as pl


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return (model(x).argmax(dim=1) == y).float().mean()


def main() -> int:
    x, y = load_iris()
    with pl.Trainer.setup(
        build_model,
        lambda params: torch.optim.Adam(params, lr=1e-2),
        data=(x[:120], y[:120]),
        global_batch=32,
    ) as trainer:
        step_sizes: list[int] = []
        losses: list[float] = []

        def note(record: pl.StepRecord) -> None:
            step_sizes.append(int(record.weight))
            losses.append(record.loss)

        trainer.every(1, note)
        for epoch in trainer.epochs(100):
            for batch in epoch:
                trainer.backward(F.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        correct = trainer.evaluate((x[120:], y[120:]), accuracy)

    print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy on the 30 other rows {correct:.1%}")
    every_row_once_per_epoch = step_sizes == [32, 32, 32, 24] * 100
    return 0 if every_row_once_per_epoch and losses[-1] < 0.5 * losses[0] and correct >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
