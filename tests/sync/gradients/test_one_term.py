"""Exact steps of one micro-batch: a sum of one term needs no rounding, and has the same bits in every world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from grouping import grouped
from models import SmallResNet, digest, images
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))


class SmallAndSigned(nn.Module):
    """The gradient of `scale` has -0.0 in it, and numbers far too small for a grid that has the others' size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean() + (self.scale * torch.tensor([0.0, -0.0, 1e-25] * 2)).sum()


class Outcome(NamedTuple):
    digest: str
    num_micro_batches: int  # that this worker ran
    momenta: list[torch.Tensor]


def train(
    change: Callable[[torch.Tensor, nn.Module], torch.Tensor] = lambda loss, _: loss,
    epochs: int = 2,
    **settings: Any,
) -> Outcome:
    """`change`: what becomes of the loss of step 4."""
    num_micro_batches = 0
    settings = {"data": X, "global_batch": 4, "exact": True, **settings}
    with pl.Trainer.setup(
        SmallAndSigned, lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), **grouped(**settings)
    ) as trainer:
        for epoch in trainer.epochs(epochs):
            for batch in epoch:
                num_micro_batches += 1
                loss = trainer.model(batch)
                trainer.backward(change(loss, trainer.model) if trainer.position.step == 3 else loss)
                trainer.step()
        momenta = [trainer.optimizer.state[p]["momentum_buffer"].clone() for p in trainer.model.parameters()]
        state = digest(trainer.model.state_dict(), trainer.optimizer.state_dict())
    return Outcome(state, num_micro_batches, momenta)


def test_every_world_takes_the_same_course(pool: WorkerPool) -> None:
    assert {outcome.digest for size in (2, 3) for outcome in pool.run(train, size)} == {train().digest}


def test_a_negative_zero_is_the_same_zero_as_among_several_workers() -> None:
    zeros = [momentum[momentum == 0.0] for momentum in train(epochs=1).momenta]
    assert sum(map(len, zeros)) == 4
    assert not any(zero.signbit().any() for zero in zeros)


def test_a_lone_gradient_is_not_rounded() -> None:
    """It is what autograd gave, to the last bit, however small: no grid cuts it off."""
    exact, plain = (train(exact=exact).momenta for exact in (True, False))
    assert all(map(torch.equal, exact, plain))


def test_no_gradient_is_too_large_for_its_step() -> None:
    assert train(lambda loss, _: 1e12 * loss).num_micro_batches == 12


def test_statistics_of_batch_norm_are_those_of_every_world(pool: WorkerPool) -> None:
    def run() -> str:
        with pl.Trainer.setup(
            SmallResNet, lambda p: torch.optim.SGD(p, lr=0.01), data=images(24), global_batch=8, exact=True
        ) as trainer:
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                    trainer.step()
            return digest(trainer.model.state_dict())

    assert set(pool.run(run, 2)) == {run()}


def test_a_gradient_that_is_no_number_is_an_error() -> None:
    with pytest.raises(pl.errors.NonFiniteError, match="gradient is nan at step 4, micro-batch 0, rank 0"):
        train(lambda loss, model: loss + (0.0 * model.scale.sum()).sqrt())  # the loss itself stays finite
