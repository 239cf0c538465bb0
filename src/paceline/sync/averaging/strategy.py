"""The averaging strategy: workers take local optimizer steps and average their replicas now and then.

Nothing is exchanged between two averages, so a slow link costs little. In return replicas drift apart between them, and
the result depends on the number of workers (local SGD). A worker's step uses its own share of the global batch.
"""

# ruff: noqa: RUF009 - `setting` returns a dataclasses.field

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from paceline.comm.base import Communicator
from paceline.core.errors import MisuseError
from paceline.core.events import Events
from paceline.core.settings import setting
from paceline.core.timing import NOT_MEASURED, Timing
from paceline.plan.cadence import Cadence, ElChe
from paceline.plan.shares import Plan
from paceline.sync.averaging.guard import DivergenceGuard
from paceline.sync.averaging.rounds import ReplicaAverage, RoundResult, RoundTotals
from paceline.sync.buffers import Buffers
from paceline.sync.numbers import SILENCE, LocalNumbers, OneLoss, RoundMean, WorkerMessage, check_nobody_left
from paceline.sync.step_numbers import StepNumbers
from paceline.sync.strategy import Accept, GradientExchange, UpdateUnless

logger = logging.getLogger("paceline")

TRANSFER_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Averaging:
    """Settings of the strategy.

    every: steps between two averages, or a `Cadence` that finds the number: its overhead_target bounds the cost of
        averaging, its anchor is the initial number of steps.
    first_step: gradients are exchanged in every step until this many steps are done (post-local SGD).
    overlap: replicas train on while their mean is computed, and apply the difference at the next average. No step is
        lost.
    transfer: the dtype in which changes are sent.
    outer: an optimizer over the common weights that uses the mean change as its gradient, for example
        `lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)`; None uses the mean itself.
    divergence_threshold: relative drift above which three rises in a row halve the steps between averages; None
        disables the guard.
    """

    every: int | Cadence = setting("steps between averages, or a cadence that adjusts them", 32, least=1)
    first_step: int = setting("exchange gradients in every step until this step (post-local SGD)", 0, least=0)
    overlap: bool = setting("continue training while the average is computed", False)
    transfer: Literal["fp32", "bf16", "fp16"] = setting("data type of the transfer", "fp32")
    outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = setting(
        "optimizer over the averaged weights, called with the parameters", None
    )
    divergence_threshold: float | None = setting("drift above which averaging becomes more frequent", 0.05, above=0)

    def __post_init__(self) -> None:
        if not isinstance(self.every, Cadence) and (type(self.every) is not int or self.every < 1):
            raise ValueError(
                f"every={self.every!r}: choose the number of steps between two averages, at least 1, or a Cadence(...)"
            )
        if isinstance(self.every, Cadence) and self.every.speed_hint is not None:
            raise ValueError("Averaging ignores Cadence(speed_hint=): give speed_hints to the run instead")
        if type(self.first_step) is not int or self.first_step < 0:
            raise ValueError(f"first_step={self.first_step!r}: choose a number of steps >= 0")
        if self.transfer not in TRANSFER_TYPES:
            raise ValueError(f"transfer={self.transfer!r} is unknown: choose one of {', '.join(TRANSFER_TYPES)}")
        if self.divergence_threshold is not None:
            DivergenceGuard(self.divergence_threshold)


class AveragedReplicas:
    """Each worker steps with its own mean gradient; replicas are averaged after a step when the interval is over.

    `local` computes this worker's mean gradient over its own micro-batches, in a world of one. `local_single`, if
    given, does so without overhead for steps in which this worker has one micro-batch.
    """

    def __init__(
        self,
        settings: Averaging,
        local: GradientExchange,
        local_single: GradientExchange | None,
        parameters: Sequence[torch.Tensor],
        statistics: Sequence[torch.Tensor],
        communicator: Communicator,
        events: Events,
    ) -> None:
        self._local = self._local_of_many = local
        self._local_of_one = local_single or local
        self._world = communicator.world
        self._interval = _interval(settings.every)
        self._is_overlapping = settings.overlap
        threshold = settings.divergence_threshold
        self._guard = None if threshold is None else DivergenceGuard(threshold)
        self._events = events
        transfer = TRANSFER_TYPES[settings.transfer]
        self._average = ReplicaAverage(parameters, statistics, communicator, transfer, settings.outer)
        self._round = RoundTotals()
        self._mean = RoundMean()
        self._newest: LocalNumbers | None = None  # of the last finished step
        self._unread: deque[LocalNumbers] = deque()  # of this round, not yet in its totals
        self._timing = NOT_MEASURED
        self._wish = 0.0
        self._forget_result()

    def begin_step(self, plan: Plan, *, total_weight: int | None = None, loss_scale: float = 1.0) -> None:
        self._plan = plan
        self._mine = plan[self._world.rank]
        self._weight = 0
        self._is_loss_known = True
        self._local = self._local_of_one if len(self._mine) == 1 else self._local_of_many
        if self._mine:
            self._local.begin_step((range(len(self._mine)),), loss_scale=loss_scale)

    def begin_micro_batch(self, number: int, weight: int, *, is_last: bool) -> None:
        self._weight += weight
        self._micro_batch_weight = weight
        self._local.begin_micro_batch(number - self._mine.start, weight, is_last=is_last)

    def backward(self, run: Callable[[], None]) -> None:
        self._local.backward(run)

    def end_micro_batch(self, loss: torch.Tensor | None) -> None:
        if loss is None and self._micro_batch_weight:
            self._is_loss_known = False
        self._local.end_micro_batch(loss)

    def has_gradient(self) -> bool:
        return self._local.has_gradient()

    @property
    def hooks_per_parameter(self) -> int:
        return self._local.hooks_per_parameter

    def set_parameters(self, parameters: Mapping[str, torch.Tensor], buffers: Buffers) -> None:
        raise MisuseError(
            "the set of trained parameters changed, which Averaging does not support: change it before the set-up, or "
            "choose strategy='gradients'"
        )

    def send(self, message: WorkerMessage = SILENCE) -> None:
        self._wish = message.wish
        if message.timing.micro_batch:
            self._timing = message.timing
        if self._mine:
            self._local.send(message)

    def finish(self, accept: Accept = lambda _: True, update_unless: UpdateUnless | None = None) -> LocalNumbers:
        timings, wishes = self._timings, self._wishes
        self._forget_result()
        own = self._local.finish() if self._mine else OneLoss(None, 0.0)
        assert isinstance(own, StepNumbers | OneLoss)
        self._newest = LocalNumbers(
            own, self._mine.start, timings, wishes, self._mean, is_loss_known=self._is_loss_known
        )
        return self._newest

    def complete(self) -> None:
        self._local.complete()
        assert self._newest is not None
        self._unread.append(self._newest)
        while self._unread and self._unread[0].has_arrived:
            self._add_oldest()
        self._round.weight += self._weight
        self._round.steps += 1
        self._round.micro_batches += self._plan[-1].stop
        if self._round.steps >= self._interval.steps:
            self._start_average(is_final=False)

    def synchronize(self) -> None:
        if self._round.steps or self._average.is_under_way:
            self._start_average(is_final=True)

    def abandon(self) -> None:
        self._local.abandon()

    def state_dict(self) -> dict[str, Any]:
        drifts = [] if self._guard is None else self._guard.drifts
        state = {"interval": self._interval.state(), "drifts": drifts, **self._average.state_dict()}
        return {"averaging": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get("averaging")
        if saved is None:
            return  # saved by a world of one, which averages nothing
        self._interval.restore(saved["interval"])
        if self._guard is not None:
            self._guard.drifts = saved["drifts"]
        self._average.load_state_dict(saved)

    def close(self) -> None:
        self._local_of_one.close()
        self._local_of_many.close()

    def _forget_result(self) -> None:
        self._timings: Sequence[Timing] = (NOT_MEASURED,) * self._world.size
        self._wishes: Sequence[float] = (0.0,) * self._world.size

    def _start_average(self, *, is_final: bool) -> None:
        """Apply the average that is under way, start the next, and wait for it unless it may overlap."""
        if self._average.is_under_way:
            self._finish_average()
        while self._unread:
            self._add_oldest()
        self._average.start(self._round, self._timing, self._wish)
        self._round = RoundTotals()
        if is_final or not self._is_overlapping:
            self._finish_average()

    def _add_oldest(self) -> None:
        loss_sum, weight = self._unread.popleft().own_part
        self._round.loss_sum += loss_sum
        self._round.loss_weight += weight

    def _finish_average(self) -> None:
        outcome = self._average.finish(has_moved_on=self._round.steps > 0)
        check_nobody_left(outcome.wishes)
        self._timings, self._wishes = outcome.timings, outcome.wishes
        self._mean = outcome.mean
        if self._newest is not None:  # its record was not handed out yet, or the epoch is over
            self._newest.mean = outcome.mean
        self._interval.observe(outcome)
        if self._guard is not None and self._guard.is_alarmed_by(outcome.drift) and self._interval.steps > 1:
            self._interval.halve()
            self._events.emit("drift", drift=outcome.drift, every=self._interval.steps)
            logger.warning(
                "replicas drift apart (relative distance %.3g, rising): averaging every %d steps from now on",
                outcome.drift,
                self._interval.steps,
            )


class _Interval(Protocol):
    """The number of steps between two averages."""

    @property
    def steps(self) -> int: ...

    def observe(self, outcome: RoundResult) -> None: ...

    def halve(self) -> None: ...

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


class _Fixed:
    """A fixed number, halved when replicas drift apart."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def observe(self, outcome: RoundResult) -> None:
        return

    def halve(self) -> None:
        self.steps = max(1, self.steps // 2)

    def state(self) -> int:
        return self.steps

    def restore(self, state: int) -> None:
        self.steps = state


class _ByCadence:
    """As many as keep the cost of averaging under a target: El Che's anchor, counted in steps."""

    def __init__(self, cadence: Cadence) -> None:
        # All workers take the same number of steps, since shares follow their speeds.
        self._el_che = cadence.for_workers(1)

    @property
    def steps(self) -> int:
        return self._el_che.total_batches

    def observe(self, outcome: RoundResult) -> None:
        if outcome.steps and outcome.round_s > 0:
            sync_ms = 1e3 * outcome.sync_s if outcome.sync_s else None
            self._el_che.report_timing([1e3 * outcome.round_s], [outcome.steps], sync_ms)

    def halve(self) -> None:
        self._el_che.nudge_anchor_down(0.5)

    def state(self) -> dict[str, Any]:
        return self._el_che.to_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._el_che = ElChe.from_dict(state)


def _interval(every: int | Cadence) -> _Interval:
    return _ByCadence(every) if isinstance(every, Cadence) else _Fixed(every)
