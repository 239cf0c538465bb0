"""Exact mode outside of its grid: the step is taken again on a wider one, and nobody can tell afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import digest
from torch import nn
from worker_pool import WorkerPool

import paceline as pl
from paceline.run.step.loop import Loop
from paceline.run.step.replica import Update

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))


def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def run(burst_at: int | None = 3, factor: float = 1e9, optimizer: Any = sgd) -> dict[str, object]:
    """At one step the loss is `factor` times as large; BatchNorm and momentum would show a step taken twice."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    seen: list[tuple[int, int]] = []
    losses: list[float] = []
    with pl.Trainer.setup(
        build,
        optimizer,
        data=X,
        global_batch=8,
        micro_batch=2,
        exact=True,
        max_grad_norm=1.0,
    ) as trainer:
        trainer.every(1, lambda record: losses.append(record.loss))
        for epoch in trainer.epochs(2):
            for batch in epoch:
                step = trainer.position.step
                loss = trainer.model(batch).square().mean() * (factor if step == burst_at else 1.0)
                trainer.backward(loss)
                completed = trainer.step()
                seen.append((step, 0 if completed is None else completed.step))
        return {
            "digest": digest(trainer.model.state_dict(), trainer.optimizer.state_dict(), losses),
            "seen": seen,
            "steps": trainer.position.step,
            "batches": int(trainer.model[1].num_batches_tracked),
        }


def test_the_step_is_repeated_and_the_split_still_does_not_show(pool: WorkerPool) -> None:
    alone = run()
    of_burst = [completed for step, completed in alone["seen"] if step == 3]
    assert of_burst == [0] * 7 + [4], "four micro-batches, abandoned, and the same four again"
    assert alone["steps"] == 10
    assert alone["batches"] == 40  # the abandoned pass left no trace in BatchNorm
    for size in (2, 3):
        assert {outcome["digest"] for outcome in pool.run(run, size)} == {alone["digest"]}


def test_a_gradient_far_below_the_grid_is_repeated_on_a_finer_one(pool: WorkerPool) -> None:
    tiny = run(3, 1e-12)
    assert len([step for step, _ in tiny["seen"] if step == 3]) == 8
    assert {outcome["digest"] for outcome in pool.run(run, 2, 3, 1e-12)} == {tiny["digest"]}


def test_ordinary_steps_are_taken_once() -> None:
    calm = run(None)
    assert len(calm["seen"]) == 40


@pytest.mark.parametrize(("burst_at", "factor"), [(None, 1.0), (3, 1e9), (3, 1e-12)])
def test_an_update_that_is_queued_early_is_a_no_op_where_the_step_is_repeated(
    burst_at: int | None, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU gets the update before the host knows whether the step counts; here a CPU does."""
    usual = run(burst_at, factor, torch.optim.AdamW)
    flags: list[float] = []
    queue = Update.clip_and_step_unless

    def noted(update: Update, is_void: torch.Tensor) -> object:
        flags.append(is_void.item())
        return queue(update, is_void)

    def enabled(loop: Loop, name: str, value: object) -> None:
        object.__setattr__(loop, name, True if name == "_may_update_early" else value)

    monkeypatch.setattr(Update, "clip_and_step_unless", noted)
    monkeypatch.setattr(Loop, "__setattr__", enabled)
    assert run(burst_at, factor, torch.optim.AdamW) == usual
    assert flags.count(0.0) == 10
    assert flags[3] == (burst_at is not None)


def test_a_rate_that_the_loop_sets_once_counts_where_that_step_is_repeated() -> None:
    def rates(factor: float) -> tuple[list[float], int]:
        seen: list[float] = []
        num_repeated = 0
        with pl.Trainer.setup(
            lambda: nn.Linear(6, 1), sgd, data=X, global_batch=8, micro_batch=2, exact=True
        ) as trainer:
            trainer.every(1, lambda record: seen.append(record.lr))
            for batch in next(trainer.epochs(1)):
                is_burst = trainer.position.step == 2
                num_repeated += trainer.is_repeating
                if is_burst and not trainer.is_repeating:
                    trainer.set_lr(0.5)
                trainer.backward(trainer.model(batch).square().mean() * (factor if is_burst else 1.0))
                trainer.step()
        return seen, num_repeated

    assert rates(1.0) == ([1e-3, 1e-3, 0.5, 0.5, 0.5], 0)
    assert rates(1e9) == ([1e-3, 1e-3, 0.5, 0.5, 0.5], 4)
