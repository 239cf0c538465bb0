"""`Run`: one worker's assembled run. The trainer, the builder and `dp_train` all drive one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from paceline.comm.base import Communicator
from paceline.core.errors import MisuseError
from paceline.core.events import Events
from paceline.core.world import World
from paceline.observe.timeline.recorder import Recorder
from paceline.plan.epoch import Steps
from paceline.run.capture.step import Stepping
from paceline.run.config import RunConfig
from paceline.run.membership.rejoining import Rejoining
from paceline.run.saving.checkpointer import Checkpointer
from paceline.run.settings import Precision
from paceline.run.step.ema import PieceAverage, WeightAverage
from paceline.run.step.loop import Loop

T = TypeVar("T")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context for forward passes in this precision."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)


@dataclass(frozen=True)
class Run:
    """The parts of a run; make one with `assemble`. Counts per epoch are None if they are not known in advance."""

    config: RunConfig
    loop: Loop
    steps: Steps
    steps_per_epoch: int | None
    micro_batches_per_epoch: int | None
    communicator: Communicator
    events: Events
    checkpointer: Checkpointer
    average: WeightAverage | None
    timeline: Recorder
    stepping: Stepping
    rejoining: Rejoining | None  # if workers may join or leave
    weight_fn: Callable[[Any], int] | None
    cleanup: ExitStack

    @property
    def world(self) -> World:
        return self.communicator.world

    @property
    def model(self) -> Any:
        return self.loop.replica.model

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward passes in the run's precision."""
        return autocast(self.config.precision, self.world.device)

    def ema_weights(self) -> AbstractContextManager[None]:
        """See `Trainer.ema_weights`."""
        if self.average is None:
            raise MisuseError("the run has no average of its weights: set a decay, such as ema=0.999")
        if not isinstance(self.average, PieceAverage):
            return self.average.in_model()
        self.check_between_steps("ema_weights() of a run with shard=")
        return self.average.in_model(self.together)

    def total_steps(self, num_epochs: int | None, max_steps: int | None) -> int | None:
        """Steps of a run with these limits; None if unknown."""
        limits = [] if max_steps is None else [max_steps]
        if num_epochs is not None and self.steps_per_epoch is not None:
            limits.append(num_epochs * self.steps_per_epoch)
        return min(limits, default=None)

    def request_leave(self, rank: int) -> None:
        """See `Trainer.request_leave`."""
        if self.rejoining is None:
            raise MisuseError("the workers of this run cannot leave: start it with min_workers, or --min-workers")
        self.rejoining.ask_to_leave(rank)

    def check_open(self) -> None:
        if self.loop.is_closed:
            raise MisuseError(
                "this trainer is closed, its run has ended: call Trainer.setup again, with the same model, or with "
                "checkpoints= to continue from a checkpoint"
            )

    def check_between_steps(self, call: str, advice: str = "") -> None:
        """Raise MisuseError inside an epoch's loop, where workers are at different micro-batches."""
        self.check_open()
        self.loop.left_epoch.settle()
        if self.loop.is_inside_epoch:
            raise MisuseError(
                f"{call} was called inside an epoch's loop, which workers leave at different times: call it between "
                f"epochs, or register it with trainer.every(n, lambda record: ...){advice}"
            )

    def together(self, operation: Callable[[], T]) -> T:
        """The result of a collective operation outside of steps, which is repeated if a worker is lost."""
        return operation() if self.rejoining is None else self.rejoining.run(operation)

    def synchronize(self, call: str) -> None:
        """Called by all workers together. Make their replicas equal if the strategy lets them differ."""
        self.check_between_steps(call)
        self.together(self.loop.exchange.synchronize)

    def enter(self) -> None:
        """Set-up is complete: from now on the run continues if a worker is lost. Newcomers join it here."""
        if self.rejoining is not None:
            self.rejoining.enter()

    def epochs(self, count: int | None, max_steps: int | None) -> Iterator[TrainingEpoch]:
        """See `Trainer.epochs`."""
        self.check_open()
        loop = self.loop
        self.enter()
        loop.left_epoch.begin_next()  # if the last one was left by `break`
        loop.max_steps = math.inf if max_steps is None else max_steps
        while not loop.is_over and (count is None or loop.position.epoch < count):
            first_step = loop.position.step
            epoch = TrainingEpoch(loop.position.epoch, self)
            yield epoch
            self.check_open()
            if loop.left_epoch.begin_next():
                if count is None and loop.position.step == first_step:
                    raise MisuseError(
                        f"epoch {epoch.number} was left without a step, so max_steps={max_steps} will never be "
                        "reached: leave it after a step, or give epochs() a number of epochs"
                    )
            elif loop.position.epoch == epoch.number and not loop.is_over:
                if epoch.was_begun:
                    return  # an exception ended it
                raise MisuseError(
                    f"epoch {epoch.number} was not iterated, so the next one cannot begin: write "
                    "`for batch in epoch`, or leave the loop over the epochs with `break`"
                )
        self.together(lambda: self.checkpointer.save_last(loop))

    def close(self, *, has_failed: bool) -> None:
        """Write the last checkpoint, unless the run has failed, and release everything. Safe to call twice."""
        if self.loop.is_closed:
            return
        self.loop.is_closed = True
        try:
            if has_failed:
                self.loop.abandon()
            else:
                self.loop.left_epoch.settle()
                self.together(lambda: self.checkpointer.finish(self.loop))
        finally:
            self.cleanup.close()


class TrainingEpoch:
    """One pass over the data: iterate over it, once, for this worker's micro-batches. `number` counts from 0."""

    def __init__(self, number: int, run: Run) -> None:
        self.number = number
        self.was_begun = False
        self._run = run

    def __iter__(self) -> Iterator[Any]:
        self._run.check_open()
        if self.was_begun:
            raise MisuseError(
                f"epoch {self.number} was iterated before, and an epoch can be iterated once: "
                "the next one comes from trainer.epochs(...)"
            )
        loop = self._run.loop
        if loop.position.epoch != self.number:
            raise MisuseError(
                f"epoch {self.number} cannot be iterated: the run is in epoch {loop.position.epoch}. Take each "
                "epoch from trainer.epochs(...) when it is its turn"
            )
        self.was_begun = True
        # Not stored: a `break` then closes the generator immediately, and with it abandons the open step.
        return loop.micro_batches(self.number)

    def __len__(self) -> int:
        """The micro-batches of the whole epoch, over all workers; this worker gets its share of them."""
        if self._run.micro_batches_per_epoch is None:
            raise TypeError("len(epoch) is not known: the data is a stream, whose length is not known in advance")
        return self._run.micro_batches_per_epoch
