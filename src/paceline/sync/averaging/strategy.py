"""The averaging strategy: workers take local optimizer steps and average their replicas periodically.

Nothing is exchanged between two averages, so a slow link costs little. In return replicas drift apart between them, and
the result depends on the number of workers (local SGD). A worker's step uses its own share of the global batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, cast

import torch

from paceline.comm.base import Communicator
from paceline.core.deferred import DeferredReader
from paceline.core.errors import CommunicationError, GenerationEnded, MisuseError
from paceline.core.events import Events
from paceline.core.timing import NOT_MEASURED, Timing
from paceline.plan.cadence import Cadence
from paceline.plan.shares import Plan
from paceline.plan.slow_link import EXCHANGE
from paceline.sync.averaging.guard import DivergenceGuard
from paceline.sync.averaging.measuring import LinkMeasurement
from paceline.sync.averaging.rounds import ReplicaAverage, WorkerRound
from paceline.sync.averaging.settings import Averaging as Averaging
from paceline.sync.compression.residuals import Residuals
from paceline.sync.compression.settings import Compression
from paceline.sync.numbers import NO_MESSAGE, LocalNumbers, OneLoss, RoundMean, WorkerMessage, check_not_abandoned
from paceline.sync.step_numbers import StepNumbers
from paceline.sync.strategy import Accept, GradientExchange, UpdateUnless

logger = logging.getLogger("paceline")


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
        seed: int,
        residuals: Residuals,
    ) -> None:
        self._local = self._local_of_many = local
        self._local_of_one = local_single or local
        self._communicator = communicator
        self._world = communicator.world
        self._parameters = list(parameters)
        self._settings = settings
        threshold = settings.divergence_threshold
        self._measurement = LinkMeasurement(communicator.world.device)
        every, compress, fragments = settings.every, settings.compress, settings.fragments
        if isinstance(every, str):
            every, compress, fragments = EXCHANGE.every, cast("Compression", EXCHANGE.compress), EXCHANGE.fragments
        self._is_cadence = isinstance(every, Cadence)
        # The number of steps between two averages of a fragment. All workers take the same: shares follow their speeds.
        self._interval = (every if isinstance(every, Cadence) else Cadence(every, max_anchor=every)).for_workers(1)
        self._max_lead = self._interval.max_batch_diff or math.inf
        self._counts = [0] * self._world.size  # micro-batches of the round, by rank
        self._guard = DivergenceGuard(math.inf if threshold is None else threshold)
        self._events = events
        self._average = ReplicaAverage(parameters, statistics, communicator, seed, compress, fragments, settings.outer)
        self._round = WorkerRound()
        residuals.owner = self._average
        self._mean = RoundMean()
        self._newest: LocalNumbers | None = None  # of the last finished step
        self._losses = DeferredReader(self._add_loss, is_ready=lambda numbers: numbers.has_arrived)  # of this round
        self._times = _RoundTimes()
        self._request = 0.0
        self._failure: BaseException | None = None  # of an average after a step, raised before the next
        # Timings and requests by rank, reported in the step after an average.
        self._reported = self._nothing_reported

    @property
    def _nothing_reported(self) -> tuple[Sequence[Timing], Sequence[float]]:
        return (NOT_MEASURED,) * self._world.size, (0.0,) * self._world.size

    def begin_step(self, plan: Plan, *, total_weight: int | None = None, loss_scale: float = 1.0) -> None:
        self._raise_failure()
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

    def backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
        self._local.backward(loss, retain_graph)

    def end_micro_batch(self, loss: torch.Tensor | None) -> None:
        if loss is None and self._micro_batch_weight:
            self._is_loss_known = False
        self._local.end_micro_batch(loss)

    def has_gradient(self) -> bool:
        return self._local.has_gradient()

    @property
    def hooks_per_parameter(self) -> int:
        return self._local.hooks_per_parameter

    def set_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Called when the workers have changed."""
        self.check_parameters(parameters)
        self._world = self._communicator.world
        self._average.connect(self._communicator)
        self._measurement.restart()
        self._counts = [0] * self._world.size
        self._request = 0.0
        self._reported = self._nothing_reported

    def check_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Raise if parameters are trained that are not averaged. Those that are frozen may be averaged."""
        averaged = set(map(id, self._parameters))
        for name, parameter in parameters.items():
            if id(parameter) not in averaged:
                raise MisuseError(
                    f"parameter {name!r} is trained now and was not at the set-up, which Averaging does not support: "
                    "add or unfreeze it before the set-up, or choose strategy='gradients'"
                )

    def send(self, message: WorkerMessage = NO_MESSAGE) -> None:
        self._request = message.request
        self._times.add(message.timing, len(self._mine))
        if self._mine:
            self._local.send(message)

    def finish(self, accept: Accept = lambda _: True, update_unless: UpdateUnless | None = None) -> LocalNumbers:
        (timings, requests), self._reported = self._reported, self._nothing_reported
        own = self._local.finish() if self._mine else OneLoss(None, 0.0)
        assert isinstance(own, StepNumbers | OneLoss)
        first, is_loss_known = self._mine.start, self._is_loss_known
        self._newest = LocalNumbers(own, first, timings, requests, self._mean, is_loss_known=is_loss_known)
        return self._newest

    def complete(self) -> None:
        self._local.complete()
        assert self._newest is not None
        self._losses.add(self._newest)
        self._round.weight += self._weight
        self._round.num_steps += 1
        self._average.add_step(self._weight, self._plan[-1].stop)
        self._counts = [count + len(own) for count, own in zip(self._counts, self._plan, strict=True)]
        try:
            self._after_step()
        except (GenerationEnded, CommunicationError) as error:
            # This step is done and must not be repeated: raised when the next one begins.
            self._failure = error

    def _after_step(self) -> None:
        if self._settings.every == "auto":
            self._measurement.add_step()
            if self._measurement.is_due:
                self._measure_link()
        # Another step like this one would exceed it.
        is_lead_reached = max(self._counts) - min(self._counts) + self._lead_of_step() > self._max_lead
        interval = -(-self._interval.total_batches // self._average.num_fragments)
        if self._round.num_steps >= interval or is_lead_reached:
            self._start_average(is_final=False)

    def _lead_of_step(self) -> int:
        counts = list(map(len, self._plan))
        return max(counts) - min(counts)

    def synchronize(self) -> None:
        self._raise_failure()
        if not self._average.num_unsent_steps:
            return
        if self._average.is_in_flight:
            self._finish_average()
        while self._average.num_unsent_steps:
            self._start_average(is_final=True)

    def _raise_failure(self) -> None:
        if (error := self._failure) is not None:
            self._failure = None
            raise error

    @property
    def averages(self) -> AveragedReplicas:
        return self

    @property
    def num_completed(self) -> int:
        """The averages that this worker has completed. Others may have completed one more when a worker is lost."""
        # All workers measure the link together, as they average: a worker that missed it takes over the state.
        return self._average.num_completed + self._measurement.is_done

    @property
    def num_unsent_steps(self) -> int:
        """Steps since the last average: what the loss of a worker costs."""
        return self._average.num_unsent_steps

    def drop(self) -> None:
        """The workers have changed: give up the average in flight. Its steps are part of the next one."""
        self._failure = None
        if self._average.is_in_flight:
            self._drop_average()

    def abandon(self) -> None:
        self._local.abandon()

    def state_dict(self) -> dict[str, Any]:
        self._losses.flush()
        own = {
            "interval": self._interval.to_dict(),
            "drifts": list(self._guard.drifts),
            "round": astuple(self._round),
            "is_link_measured": self._measurement.is_done,
            "mean": tuple(self._mean),
        }
        return {"averaging": {**own, **self._average.state_dict()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get("averaging")
        if saved is None:
            return  # saved by a world of one, which averages nothing
        self._measurement.restart()
        self._measurement.is_done = saved["is_link_measured"]
        self._interval = self._interval.resumed(saved["interval"])
        self._guard.drifts.clear()
        self._guard.drifts.extend(saved["drifts"])
        self._average.load_state_dict(saved)
        self._losses.clear()
        self._round = WorkerRound(*saved["round"])
        self._mean = RoundMean(*saved.get("mean", ()))  # older checkpoints have none

    def close(self) -> None:
        self._local_of_one.close()
        self._local_of_many.close()

    def _add_loss(self, numbers: LocalNumbers) -> None:
        loss_sum, weight = numbers.own_part
        self._round.loss_sum += loss_sum
        self._round.loss_weight += weight

    def _start_average(self, *, is_final: bool) -> None:
        """Apply the average in flight, start the next one, and wait for it unless it may overlap."""
        if self._average.is_in_flight:
            self._finish_average()
        self._losses.flush()
        own, self._times = self._times.mean, _RoundTimes()
        self._round.micro_batch_s, _, self._round.rest_s, self._round.data_s, self._round.feed_s = own
        self._round.request = self._request
        sent, self._round = self._round, WorkerRound()
        self._counts = [0] * self._world.size
        try:
            self._average.start(sent)
        except BaseException:
            self._drop_average()
            raise
        if is_final or not self._settings.overlap:
            self._finish_average()

    def _drop_average(self) -> None:
        """The average in flight has failed: its steps are part of the next one."""
        self._round.add(self._average.drop())

    def _finish_average(self) -> None:
        try:
            rounds, drift = self._average.finish(has_moved_on=self._round.num_steps > 0)
        except BaseException:
            self._drop_average()
            raise
        requests, num_steps = [each.request for each in rounds], int(rounds[0].num_steps)
        check_not_abandoned(requests)
        timings = [Timing(each.micro_batch_s, each.sync_s, each.rest_s, each.data_s, each.feed_s) for each in rounds]
        if num_steps:
            self._reported = timings, requests
            loss_weight = sum(each.loss_weight for each in rounds)
            loss = sum(each.loss_sum for each in rounds) / loss_weight if loss_weight else math.nan
            self._mean = RoundMean(loss, sum(each.weight for each in rounds) / num_steps)
            if self._newest is not None:  # its record was not handed out yet, or the epoch is over
                self._newest.mean = self._mean
        # The slowest worker's steps, and the average of the worker that arrived last, which did not wait for others.
        round_s, sync_s = max(each.round_s for each in rounds), min(each.sync_s for each in rounds)
        if self._is_cadence and num_steps and round_s > 0:
            cycle_ms = 1e3 * sync_s * self._average.num_fragments
            self._interval.report_timing([1e3 * round_s], [num_steps], cycle_ms or None)
        if drift is not None and self._guard.is_alarmed_by(drift) and self._interval.total_batches > 1:
            self._interval.nudge_anchor_down(0.5)
            every = self._interval.total_batches
            self._events.emit("drift", drift=drift, every=every)
            logger.warning(
                "replicas drift apart (relative distance %.3g, rising): averaging every %d steps from now on",
                drift,
                every,
            )

    def _measure_link(self) -> None:
        use = self._measurement.measure(self._average.num_values, self._communicator)
        self._events.emit(
            "averaging",
            every=EXCHANGE.every,
            compress=EXCHANGE.compress,
            fragments=EXCHANGE.fragments,
            reason=use.reason,
        )


class _RoundTimes:
    """This worker's times since the last average. It reports none of a round in which it had no micro-batch."""

    def __init__(self) -> None:
        self._num_micro_batches = self._num_rests = 0
        self._compute_s = self._rest_s = self._data_s = self._feed_s = 0.0

    def add(self, timing: Timing, num_micro_batches: int) -> None:
        if timing.micro_batch:
            self._num_micro_batches += num_micro_batches
            self._compute_s += num_micro_batches * timing.micro_batch
            self._data_s += num_micro_batches * timing.data
        if timing.rest:
            self._num_rests += 1
            self._rest_s += timing.rest
        self._feed_s += timing.feed

    @property
    def mean(self) -> Timing:
        count, num_rests = max(self._num_micro_batches, 1), max(self._num_rests, 1)
        return Timing(self._compute_s / count, 0.0, self._rest_s / num_rests, self._data_s / count, self._feed_s)


class GradientsFirst:
    """Post-local SGD: forwards all calls to one exchange until the run has done `num_steps` steps, then to another.

    events: know the run's step.
    """

    def __init__(
        self, first: GradientExchange, then: Callable[[], GradientExchange], num_steps: int, events: Events
    ) -> None:
        self._now = first
        self._then: Callable[[], GradientExchange] | None = then  # None once it is used
        self._num_steps = num_steps
        self._events = events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)

    def complete(self) -> None:
        self._now.complete()
        self._switch_if_due()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._switch_if_due()
        self._now.load_state_dict(state)

    def _switch_if_due(self) -> None:
        if self._then is not None and self._events.step >= self._num_steps:
            self._now.close()
            self._now, self._then = self._then(), None
