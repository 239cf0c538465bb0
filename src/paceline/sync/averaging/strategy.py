"""The averaging strategy: workers take optimizer steps of their own, and every so often meet at their mean.

Between two meetings nothing is exchanged, so a slow link costs little. The price: replicas drift apart in between, and
the result depends on the number of workers (local SGD). Each worker's step is over its own share of the global batch.
"""

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
from paceline.core.timing import NOT_MEASURED, Timing
from paceline.plan.cadence import Cadence, ElChe
from paceline.plan.shares import Plan
from paceline.sync.averaging.guard import DivergenceGuard
from paceline.sync.averaging.rounds import Meeting, Outcome, Round
from paceline.sync.buffers import Buffers
from paceline.sync.numbers import SILENCE, LocalNumbers, OneLoss, RoundMean, WorkerMessage, check_nobody_left
from paceline.sync.step_numbers import StepNumbers
from paceline.sync.strategy import Accept, GradientExchange, UpdateUnless

logger = logging.getLogger("paceline")

TRANSFER_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Averaging:
    """Settings of the strategy.

    every: steps between two meetings, or a `Cadence` that finds them: its overhead_target bounds what the meetings
    cost, its anchor is the number of steps to start with.
    first_step: before this many steps are done, gradients are exchanged in every step (post-local SGD).
    overlap: replicas go on training while their mean is computed, and take over the difference at the next meeting;
    none of their steps is lost.
    transfer: the type in which their changes travel.
    outer: an optimizer over the common weights that treats the mean change as its gradient, for example
    `lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)`; None takes the mean as it is.
    divergence_threshold: relative drift above which three rises in a row halve the steps between meetings; None for
    no guard.
    """

    every: int | Cadence = 32
    first_step: int = 0
    overlap: bool = False
    transfer: Literal["fp32", "bf16", "fp16"] = "fp32"
    outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None
    divergence_threshold: float | None = 0.05

    def __post_init__(self) -> None:
        if not isinstance(self.every, Cadence) and (type(self.every) is not int or self.every < 1):
            raise ValueError(
                f"every={self.every!r}: choose how many steps lie between two averages, at least 1, or a Cadence(...)"
            )
        if isinstance(self.every, Cadence) and self.every.speed_hint is not None:
            raise ValueError("Cadence(speed_hint=) would be ignored in averaging: give speed_hints to the run instead")
        if type(self.first_step) is not int or self.first_step < 0:
            raise ValueError(f"first_step={self.first_step!r}: choose a number of steps >= 0")
        if self.transfer not in TRANSFER_TYPES:
            raise ValueError(f"transfer={self.transfer!r} is unknown: choose one of {', '.join(TRANSFER_TYPES)}")
        if self.divergence_threshold is not None:
            DivergenceGuard(self.divergence_threshold)


class AveragedReplicas:
    """Gradients stay with the worker that computed them; after its step, when it is time, replicas are averaged.

    `local` gives this worker's mean gradient over its own micro-batches, in a world of one; `local_single`, where there
    is one, does so at no cost for a step in which it has just one.
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
        self._meeting = Meeting(parameters, statistics, communicator, TRANSFER_TYPES[settings.transfer], settings.outer)
        self._round = Round()
        self._mean = RoundMean()
        self._newest: LocalNumbers | None = None  # of the step that was finished last
        self._unread: deque[LocalNumbers] = deque()  # of this round, and not in its sums yet
        self._timing = NOT_MEASURED
        self._wish = 0.0
        self._forget_outcome()

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
            "the trained parameters changed in a run that averages replicas, whose meetings are laid out for those of "
            "the set-up: change them before the set-up, or choose strategy='gradients'"
        )

    def send(self, message: WorkerMessage = SILENCE) -> None:
        self._wish = message.wish
        if message.timing.micro_batch:
            self._timing = message.timing
        if self._mine:
            self._local.send(message)

    def finish(self, accept: Accept = lambda _: True, update_unless: UpdateUnless | None = None) -> LocalNumbers:
        timings, wishes = self._timings, self._wishes
        self._forget_outcome()
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
            self._meet(is_final=False)

    def synchronize(self) -> None:
        if self._round.steps or self._meeting.is_under_way:
            self._meet(is_final=True)

    def abandon(self) -> None:
        self._local.abandon()

    def state_dict(self) -> dict[str, Any]:
        drifts = [] if self._guard is None else self._guard.drifts
        state = {"interval": self._interval.state(), "drifts": drifts, **self._meeting.state_dict()}
        return {"averaging": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get("averaging")
        if saved is None:
            return  # a worker alone saved it: there was nothing to average
        self._interval.restore(saved["interval"])
        if self._guard is not None:
            self._guard.drifts = saved["drifts"]
        self._meeting.load_state_dict(saved)

    def close(self) -> None:
        self._local_of_one.close()
        self._local_of_many.close()

    def _forget_outcome(self) -> None:
        self._timings: Sequence[Timing] = (NOT_MEASURED,) * self._world.size
        self._wishes: Sequence[float] = (0.0,) * self._world.size

    def _meet(self, *, is_final: bool) -> None:
        """Take what the last meeting found, start the next, and wait for that one too unless it may overlap."""
        if self._meeting.is_under_way:
            self._take_outcome()
        while self._unread:
            self._add_oldest()
        self._meeting.start(self._round, self._timing, self._wish)
        self._round = Round()
        if is_final or not self._is_overlapping:
            self._take_outcome()

    def _add_oldest(self) -> None:
        loss_sum, weight = self._unread.popleft().own_part
        self._round.loss_sum += loss_sum
        self._round.loss_weight += weight

    def _take_outcome(self) -> None:
        outcome = self._meeting.finish(has_moved_on=self._round.steps > 0)
        check_nobody_left(outcome.wishes)
        self._timings, self._wishes = outcome.timings, outcome.wishes
        self._mean = outcome.mean
        if self._newest is not None:  # after its step: nobody has seen its record yet, or the epoch is over
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
    """Steps between two meetings."""

    @property
    def steps(self) -> int: ...

    def observe(self, outcome: Outcome) -> None: ...

    def halve(self) -> None: ...

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


class _Fixed:
    """As many as the user says, fewer when replicas drift."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def observe(self, outcome: Outcome) -> None:
        return

    def halve(self) -> None:
        self.steps = max(1, self.steps // 2)

    def state(self) -> int:
        return self.steps

    def restore(self, state: int) -> None:
        self.steps = state


class _ByCadence:
    """As many as keep the meetings' cost under a target: El Che's anchor, where a batch is a step."""

    def __init__(self, cadence: Cadence) -> None:
        # All take equally many steps, since shares already follow their speeds: one worker stands for all.
        self._el_che = cadence.for_workers(1)

    @property
    def steps(self) -> int:
        return self._el_che.total_batches

    def observe(self, outcome: Outcome) -> None:
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
