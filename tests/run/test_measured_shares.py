"""Shares follow measured speed, and nobody can tell from the result."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from scenarios import train
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

X, Y = vectors(24 * 8 * 2)
FAST_S = 0.004


def run(slowness: list[float], change_at: int | None = None, **settings: Any) -> dict[str, Any]:
    """24 steps of 8 micro-batches; a micro-batch takes `slowness[rank]` times 4 ms, after the change the reverse."""
    shares: list[tuple[int, ...]] = []
    rank = int(os.environ["RANK"])
    with pl.Trainer.setup(
        mlp,
        lambda p: torch.optim.SGD(p, lr=0.1),
        data=(X, Y),
        global_batch=16,
        micro_batch=2,
        exact=True,
        **grouped(**settings),
    ) as trainer:
        trainer.every(1, lambda record: shares.append(record.shares))
        for epoch in trainer.epochs(1):
            for batch in epoch:
                is_changed = change_at is not None and trainer.position.step >= change_at
                time.sleep(FAST_S * (slowness[::-1] if is_changed else slowness)[rank])
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        return {"shares": shares, "digest": digest(trainer.model.state_dict())}


def typical(shares: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The most frequent division: a machine that is busy with something else may disturb single steps."""
    return statistics.mode(shares)


def test_a_slow_worker_gets_less_and_the_weights_stay_the_same(pool: WorkerPool) -> None:
    (equal, _) = pool.run(lambda: run([1, 1], shares="equal"), 2)
    outcomes = pool.run(lambda: run([1, 4]), 2)
    assert outcomes[0] == outcomes[1]
    shares = outcomes[0]["shares"]
    assert shares[0] == (4, 4)  # nothing is known yet
    assert all(len(s) == 2 and sum(s) == 8 for s in shares)
    assert typical(shares[4:]) in ((6, 2), (7, 1))
    assert outcomes[0]["digest"] == equal["digest"]


def test_a_change_of_speed_is_followed_both_ways(pool: WorkerPool) -> None:
    shares = pool.run(lambda: run([1, 5], change_at=12), 2)[0]["shares"]
    assert typical(shares[4:12]) in ((6, 2), (7, 1))
    assert typical(shares[18:]) in ((2, 6), (1, 7))


def test_three_workers_and_hints(pool: WorkerPool) -> None:
    outcomes = pool.run(lambda: run([1, 3, 3], speed_hints=[6, 1, 1]), 3)
    shares = outcomes[0]["shares"]
    assert shares[0] == (6, 1, 1)
    assert typical(shares[4:])[0] > max(typical(shares[4:])[1:])
    assert len({outcome["digest"] for outcome in outcomes}) == 1


def test_fixed_shares_are_not_touched_by_measurements(pool: WorkerPool) -> None:
    assert set(pool.run(lambda: run([1, 4], shares=[1, 3]), 2)[0]["shares"]) == {(2, 6)}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_measured_shares_keep_the_promise(size: int, pool: WorkerPool) -> None:
    alone = train("transformer")
    assert {outcome.digest for outcome in pool.run(train, size, "transformer")} == {alone.digest}
