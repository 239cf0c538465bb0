"""Code that all workers run after the exchange draws the same random numbers, however many workers there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import mlp, vectors
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

X, Y = vectors(24)


class NoisySGD(torch.optim.SGD):
    """An optimizer that draws random numbers."""

    drawn: list[float]

    def step(self, closure: Any = None) -> Any:
        self.drawn.append(torch.rand(()).item())
        return super().step(closure)


def draws(kind: str) -> list[float]:
    drawn: list[float] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = (NoisySGD if kind == "optimizer" else torch.optim.SGD)(parameters, lr=0.1)
        made.drawn = drawn  # type: ignore[attr-defined]
        return made

    with pl.Trainer.setup(mlp, optimizer, data=(X, Y), global_batch=8, micro_batch=2) as trainer:
        if kind == "step":
            trainer.every(1, lambda _: drawn.append(torch.rand(()).item()))
        if kind == "gradients":
            trainer.on_gradients(lambda _: drawn.append(torch.rand(()).item()))
        if kind == "epoch":
            trainer.every_epoch(1, lambda _: drawn.append(torch.rand(()).item()))
        for epoch in trainer.epochs(2):
            for batch in epoch:
                torch.rand(trainer.world.rank + 1)  # a forward pass that draws differently on each worker
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
    return drawn


@pytest.mark.parametrize("kind", ["step", "gradients", "epoch", "optimizer"])
def test_all_workers_draw_the_same(kind: str, pool: WorkerPool) -> None:
    alone = draws(kind)
    assert len(set(alone)) == (2 if kind == "epoch" else 6)
    for size in (2, 3):
        assert pool.run(lambda: draws(kind), size) == [alone] * size
