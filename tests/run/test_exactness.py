"""The promise, bit for bit: the course of a run does not depend on the number of workers or on how they share it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from models import digest, mlp, vectors
from scenarios import SCENARIOS, Outcome, train
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl
from paceline.sync.gradients.rounding import NUM_PEAKS

# Splits of a full step of eight micro-batches; the tail's three are split in the same proportion.
SPLITS = [[4, 4], [6, 2], [1, 5, 2]]


@cache
def alone(name: str) -> Outcome:
    return train(name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_digest_on_any_split(name: str, pool: WorkerPool) -> None:
    reference = alone(name)
    assert reference.num_steps == 22
    assert reference.losses[-1] < reference.losses[0]
    for split in SPLITS:
        for rank, outcome in enumerate(pool.run(train, len(split), name, split)):
            assert outcome.losses == reference.losses, (split, rank)
            assert outcome.digest == reference.digest, (split, rank)


@pytest.mark.parametrize("name", SCENARIOS)
def test_plain_mode_agrees_to_rounding(name: str, pool: WorkerPool) -> None:
    def plainly(*args: object) -> Outcome:
        return train(*args, exact=False)

    reference = plainly(name)
    for split in SPLITS:
        for outcome in pool.run(plainly, len(split), name, split):
            for key, expected in reference.parameters.items():
                assert relative_difference(outcome.parameters[key], expected) <= 1e-5, (split, key)


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-12))


def many_micro_batches() -> str:
    x, y = vectors(60)
    with pl.Trainer.setup(
        mlp, lambda p: torch.optim.SGD(p, lr=0.1), data=(x, y), global_batch=20, micro_batch=1, exact=True
    ) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        return digest(trainer.model.state_dict())


def test_more_micro_batches_than_peaks_are_computed_at_a_time(pool: WorkerPool) -> None:
    assert NUM_PEAKS < 20
    alone = many_micro_batches()
    assert pool.run(many_micro_batches, 2) == [alone] * 2
