"""What cannot work is an error that says what to do instead, on the worker that did it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from grouping import grouped
from models import mlp, vectors
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.observe.timeline.recorder import NoTimeline
from paceline.run.step.stopwatch import HostStopwatch

X, Y = vectors(40)


def setup(model: Any = mlp, **settings: Any) -> pl.Trainer:
    settings = {"data": (X, Y), "global_batch": 8, "micro_batch": 4, **settings}
    return pl.Trainer.setup(model, lambda p: torch.optim.SGD(p, lr=0.1), **grouped(**settings))


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


@pytest.mark.parametrize("settings", [{}, {"global_batch": 4}], ids=["buckets", "direct"])
def test_a_loss_of_another_model_is_refused(settings: dict[str, Any]) -> None:
    another = mlp()
    with (
        setup(**settings) as trainer,
        pytest.raises(pl.errors.MisuseError, match=r"no trained parameter a gradient: compute the loss with trainer"),
    ):
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(loss_of(another, batch))
                trainer.step()


def test_requires_grad_may_be_toggled_within_a_micro_batch() -> None:
    model = mlp()
    with setup(model) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                model[0].weight.requires_grad_(False)
                loss = loss_of(model, batch)
                model[0].weight.requires_grad_(True)
                trainer.backward(loss)
                trainer.step()
        assert trainer.position.epoch == 1


def test_leaving_a_step_whose_exchange_has_begun_is_told_on_all_workers(pool: WorkerPool) -> None:

    def wide() -> nn.Module:  # several buckets: the first leaves during backward
        return nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)), nn.Linear(12, 3_000_000 // 12, bias=False))

    def run() -> None:
        with setup(wide, shares="equal", timeout_s=60, micro_batch=4) as trainer:
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    trainer.backward(loss_of(trainer.model, batch))
                    if trainer.position.step == 1 and trainer.world.rank == 0:
                        break
                    trainer.step()

    with pytest.raises(WorkersFailed) as failed:
        pool.run(run, 2)
    assert {type(error) for error in failed.value.errors.values()} == {pl.errors.MisuseError}, failed.value
    assert all(str(e).startswith("rank 0 left the loop of an epoch") for e in failed.value.errors.values())


class Hungry(nn.Module):
    """Runs out of memory on the way back, or forth."""

    def __init__(self, forward: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._forward:
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
        return _FailsBackward.apply(self.layer(x))


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")


@pytest.mark.parametrize("forward", [True, False])
def test_an_out_of_memory_error_says_what_to_change(forward: bool) -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised, setup(lambda: Hungry(forward), global_batch=12) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(loss_of(trainer.model, batch))
                trainer.step()
    (note,) = raised.value.__notes__
    assert note.startswith("paceline: out of memory on cpu in a forward and backward of 4 samples. Weights, gradients")
    assert "- micro_batch=2 needs about 50% of the remaining memory; a step stays 12 samples, in 6 micro-" in note
    assert "gradient checkpointing" in note
    assert "precision='bf16'" in note


def test_backward_explains_it_also_without_a_with_block() -> None:
    trainer = setup(lambda: Hungry(False))
    batches = iter(next(trainer.epochs(1)))
    batch = next(batches)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.backward(loss_of(trainer.model, batch))
    trainer.close()
    assert raised.value.__notes__[0].startswith("paceline: out of memory on cpu")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"global_batch": 9, "micro_batch": 9}, "- micro_batch=3 needs about 33% of"),
        ({"physical_batch": 8}, "forward and backward of 8 samples"),
        ({"physical_batch": 8}, "- physical_batch=4 needs less at a time"),
        ({"micro_batch": 1}, "forward and backward of 1 sample."),
    ],
)
def test_the_remedy_fits_the_settings(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised, setup(lambda: Hungry(True), **settings) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                loss_of(trainer.model, batch)
    assert text in raised.value.__notes__[0]


def test_a_loss_that_the_run_was_not_told_is_no_number() -> None:
    losses: list[float] = []
    with setup() as trainer:
        trainer.every(1, lambda record: losses.append(record.loss))
        for epoch in trainer.epochs(1):
            for batch in epoch:
                loss = loss_of(trainer.model, batch)
                loss.backward() if trainer.position.step == 1 else trainer.backward(loss)
                trainer.step()
    assert [math.isnan(loss) for loss in losses] == [False, True, False, False, False]


def test_the_first_steps_other_times_are_not_taken_for_usual() -> None:
    watch = HostStopwatch(NoTimeline())
    timings = []
    for step in range(3):
        watch.begin_step()
        for _ in range(4):
            watch.mark()
        timings.append(watch.send(1))
        watch.mark()
        watch.mark()
        watch.completed(step)
    assert [t.rest > 0 and t.sync > 0 for t in timings] == [False, False, True]
