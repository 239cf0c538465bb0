"""The cadence: steps as large as a dear exchange asks for, every sample once, one model everywhere."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl
from paceline.comm.process_group import ProcessGroupCommunicator

NUM_SAMPLES = 960
X, Y = vectors(NUM_SAMPLES)


@contextmanager
def slow_exchange(seconds: float) -> Iterator[None]:
    """As over a slow link: an exchange takes so long, however early a worker comes to it."""
    all_reduce = ProcessGroupCommunicator.all_reduce

    def slow(self: Any, tensor: torch.Tensor) -> Any:
        pending = all_reduce(self, tensor)

        class Slow:
            def wait(self) -> None:
                pending.wait()
                time.sleep(seconds)

        return Slow()

    ProcessGroupCommunicator.all_reduce = slow  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ProcessGroupCommunicator.all_reduce = all_reduce  # type: ignore[method-assign]


def run(
    cadence: Any, *, micro_batch_s: tuple[float, ...] = (0.002,), exchange_s: float = 0.0, epochs: int = 1
) -> dict[str, Any]:
    rank = int(os.environ.get("RANK", 0))
    records: list[pl.StepRecord] = []
    seen: list[torch.Tensor] = []
    with (
        slow_exchange(exchange_s),
        pl.Trainer.setup(
            mlp,
            lambda p: torch.optim.SGD(p, lr=0.05),
            data=(X, Y),
            micro_batch=2,
            strategy=cadence,
            runtime=pl.Runtime(backend="gloo"),
        ) as trainer,
    ):
        trainer.every(1, records.append)
        for epoch in trainer.epochs(epochs):
            for batch in epoch:
                time.sleep(micro_batch_s[rank % len(micro_batch_s)])
                seen.append(batch.x)
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        return {
            "shares": [record.shares for record in records],
            "weights": [record.weight for record in records],
            "seen": torch.cat(seen),
            "digest": digest(trainer.model.state_dict()),
            "position": trainer.position,
        }


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_sample_once_and_one_model_everywhere(size: int, pool: WorkerPool) -> None:
    outcomes = pool.run(lambda: run(pl.Cadence(anchor=7)), size)
    assert len({outcome["digest"] for outcome in outcomes}) == 1
    assert sum(outcomes[0]["weights"]) == NUM_SAMPLES
    seen = torch.cat([outcome["seen"] for outcome in outcomes])
    assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, X.tolist()))
    assert outcomes[0]["shares"][0] == (7,) * size
    assert outcomes[0]["position"] == pl.reports.Position(1, 0, len(outcomes[0]["shares"]))


def test_a_dear_exchange_makes_larger_steps(pool: WorkerPool) -> None:
    dear = pool.run(lambda: run(pl.Cadence(anchor=2, overhead_target=0.1), exchange_s=0.02, epochs=2), 2)[0]["shares"]
    cheap = pool.run(lambda: run(pl.Cadence(anchor=2, overhead_target=0.5), micro_batch_s=(0.01,)), 2)[0]["shares"]
    # 20 ms should be a tenth of the step's time: about 90 micro-batches of a little over 2 ms.
    assert dear[0] == (2, 2)
    assert max(map(min, dear)) >= 20
    assert statistics.median(map(max, cheap[:-1])) <= 4  # on a busy machine some are larger


def test_a_fast_worker_does_more_between_syncs(pool: WorkerPool) -> None:
    shares = pool.run(lambda: run(pl.Cadence(anchor=4, max_anchor=4), micro_batch_s=(0.004, 0.02)), 2)[0]["shares"]
    assert shares[0] == (4, 4)
    fast, slow = (sum(share[rank] for share in shares[1:-1]) for rank in (0, 1))
    assert fast > 1.5 * slow  # five times on an idle machine


def test_alone_a_cadence_is_a_batch_size() -> None:
    outcome = run(pl.Cadence(anchor=8, max_anchor=8), micro_batch_s=(0.0,))
    assert set(outcome["shares"]) == {(8,)}
    assert sum(outcome["weights"]) == NUM_SAMPLES


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"global_batch": 8, "micro_batch": 2}, "give micro_batch, and no global_batch"),
        ({}, "give micro_batch, and no global_batch"),
        ({"micro_batch": 2, "exact": True}, "exact=True needs strategy='gradients': with a cadence"),
        ({"micro_batch": 2, "shares": "equal"}, "balancing would be ignored: a cadence has its own"),
    ],
)
def test_what_a_cadence_cannot_follow(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pl.Trainer.setup(
            mlp, lambda p: torch.optim.SGD(p, lr=0.1), data=(X, Y), strategy=pl.Cadence(), **grouped(**settings)
        )


def test_bad_knobs_are_found_at_once() -> None:
    with pytest.raises(ValueError, match="anchor=0 is not a positive integer"):
        pl.Cadence(anchor=0)
    with pytest.raises(ValueError, match="global_batch is missing"):
        pl.Trainer.setup(mlp, lambda p: torch.optim.SGD(p, lr=0.1), data=(X, Y))


def test_the_number_of_steps_is_not_known_beforehand() -> None:
    with pl.Trainer.setup(
        mlp, lambda p: torch.optim.SGD(p, lr=0.1), data=(X, Y), strategy=pl.Cadence(), micro_batch=2
    ) as trainer:
        assert trainer.steps_per_epoch is None
