"""Where a run ends: after epochs, after steps, or when a hook says so; on all workers at the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

X, Y = vectors(40)


def setup(**settings: Any) -> pl.Trainer:
    settings = {"data": (X, Y), "global_batch": 8, "micro_batch": 4, "exact": True, **settings}
    return pl.Trainer.setup(mlp, lambda p: torch.optim.SGD(p, lr=0.1), **grouped(**settings))


def train(trainer: pl.Trainer, *epochs: int, **limits: int) -> list[int]:
    visited = []
    for epoch in trainer.epochs(*epochs, **limits):
        visited.append(epoch.number)
        for batch in epoch:
            trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
            trainer.step()
    return visited


@pytest.mark.parametrize(
    ("epochs", "max_steps", "expected"),
    [((), 3, (0, 6, 3)), ((), 5, (1, 0, 5)), ((), 7, (1, 4, 7)), ((1,), 7, (1, 0, 5)), ((9,), 7, (1, 4, 7))],
)
def test_steps_and_epochs_whichever_comes_first(
    epochs: tuple[int, ...], max_steps: int, expected: tuple[int, ...]
) -> None:
    with setup() as trainer:
        train(trainer, *epochs, max_steps=max_steps)
        assert trainer.position == expected


def test_a_worker_without_a_share_in_the_last_step_ends_with_the_others(pool: WorkerPool) -> None:
    def run() -> tuple[tuple[int, ...], str]:
        with setup(shares=[1, 0], timeout_s=60) as trainer:
            train(trainer, max_steps=7)
            return trainer.position, digest(trainer.model.state_dict())

    first, second = pool.run(run, 2)
    assert first == second
    assert first[0] == (1, 4, 7)


def test_a_run_that_ended_goes_on_where_it_was_given_more_steps(tmp_path: Path) -> None:
    def run(root: Path, max_steps: int) -> str:
        with setup(checkpoints=pl.Checkpoints(root)) as trainer:
            train(trainer, max_steps=max_steps)
            return digest(trainer.model.state_dict())

    run(tmp_path / "cut", 3)
    assert (tmp_path / "cut/step-00000003").is_dir()
    assert run(tmp_path / "cut", 8) == run(tmp_path / "whole", 8)


def test_a_hook_may_end_the_run_on_all_workers(pool: WorkerPool) -> None:
    def run() -> tuple[int, ...]:
        with setup(shares=[1, 0], timeout_s=60) as trainer:
            trainer.every(1, lambda record: trainer.end() if record.step == 4 else None)
            assert train(trainer, 3) == [0]
            return trainer.position

    assert pool.run(run, 2) == [(0, 8, 4), (0, 8, 4)]


def test_the_end_of_an_epoch_may_be_the_end_of_the_run() -> None:
    with setup() as trainer:
        trainer.every_epoch(2, lambda _: trainer.end())
        assert train(trainer, 9) == [0, 1]


def test_what_has_no_end_or_would_end_apart_is_refused() -> None:
    with setup() as trainer:
        with pytest.raises(ValueError, match=r"epochs\(\) needs an end: give the number of epochs, or max_steps"):
            next(trainer.epochs())
        with pytest.raises(ValueError, match=r"epochs\(count=1.5\): choose an integer >= 0"):
            trainer.epochs(1.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"epochs\(max_steps=-1\): choose an integer >= 0"):
            trainer.epochs(max_steps=-1)
        for _ in next(trainer.epochs(1)):
            with pytest.raises(pl.errors.MisuseError, match=r"end\(\) was called inside an epoch's loop"):
                trainer.end()
            break
