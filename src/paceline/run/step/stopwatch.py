"""Measures where a worker's time goes in a step: micro-batches, exchange, rest.

The moments of a step: it begins; its plan is known; for each pass over micro-batches: it begins, its data has arrived,
backward is done; then the exchange begins, its result has arrived, the optimizer is done, replicas are averaged (where
they are). The loop calls `begin_step` at the first, `send` where the exchange begins, `completed` at the last, and
`mark` at all others. A recorder gets the moments of completed steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from paceline.core.deferred import DeferredReader
from paceline.core.timing import NOT_MEASURED, Timing, split_sync
from paceline.observe.timeline.recorder import NoTimeline, Recorder
from paceline.plan.shares import Plan
from paceline.run.report import Report, WorkerReport, ratio
from paceline.sync.numbers import Numbers

# The index of the first pass among a step's moments, and the moments of a pass.
_FIRST_PASS, _PASS = 2, 3
STEPS_PER_READ = 32


class HostStopwatch:
    """For devices whose operations are synchronous. One of `interval` steps is measured."""

    def __init__(self, recorder: Recorder, interval: int = 1) -> None:
        self._record = None if isinstance(recorder, NoTimeline) else recorder.step
        self._interval = interval if self._record is None else 1
        self._num_begun = 0
        self._is_measured = True
        self._moments: list[float] = []
        self._num_reported = 0  # of these, up to the last that was measured
        self._in_passes = self._sync = self._rest = self._feed = 0.0

    def begin_step(self) -> None:
        self._is_measured = self._num_begun < 2 * self._interval or self._num_begun % self._interval == 0
        self._num_begun += 1
        self._moments = [perf_counter()]

    def mark(self) -> None:
        if self._is_measured:
            self._moments.append(perf_counter())

    def send(self, num_micro_batches: int) -> Timing:
        """The exchange begins. Returns the time of this step's micro-batches and the rest of the step before."""
        if not self._is_measured:
            return NOT_MEASURED
        moments = self._moments
        moments.append(perf_counter())
        in_passes = data = 0.0
        for first in range(_FIRST_PASS, len(moments) - 1, _PASS):
            in_passes += moments[first + _PASS - 1] - moments[first]
            data += moments[first + 1] - moments[first]
        self._in_passes = in_passes
        count = num_micro_batches or 1  # without a micro-batch both are 0
        return Timing(in_passes / count, self._sync, self._rest, data / count, self._feed)

    def completed(self, step: int) -> None:
        if not self._is_measured:
            return
        moments = self._moments
        moments.append(perf_counter())
        if self._num_begun > 1:  # the first includes one-time work: optimizer state, connections
            sent, received, ended, _ = moments[-4:]
            self._sync = received - sent
            self._rest = sent - moments[1] - self._in_passes + ended - received
            self._feed = (self._num_begun - self._num_reported) * (moments[1] - moments[0])
        self._num_reported = self._num_begun
        if self._record is not None:
            self._record(step, moments)

    def flush(self) -> None:
        """Record all steps so far; no further step may follow."""


class CudaStopwatch:
    """For queued work: events in the stream, read once the device has passed them, without waiting.

    Recording an event costs the host as much as a small kernel, so only one of `interval` steps is measured.
    """

    def __init__(self, recorder: Recorder, interval: int) -> None:
        self._record = None if isinstance(recorder, NoTimeline) else recorder.step
        self._interval = interval if self._record is None else 1
        self._num_begun = self._num_reported = 0
        self._clock = _DeviceClock()
        self._unread: deque[_MeasuredStep] = deque()

    def begin_step(self) -> None:
        self._is_measured = self._num_begun < 2 * self._interval or self._num_begun % self._interval == 0
        self._num_begun += 1
        if self._is_measured:
            self._stream = torch.cuda.current_stream()  # looked up once: that takes longer than recording an event
            self._moments: list[torch.cuda.Event] = []
            self._begun_at = perf_counter()
            self.mark()

    def mark(self) -> None:
        if self._is_measured:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record(self._stream)
            self._moments.append(moment)

    def send(self, num_micro_batches: int) -> Timing:
        """The exchange begins. Returns the latest known timing, of an earlier step."""
        self.mark()
        self._num_micro_batches = num_micro_batches
        return self._read()

    def completed(self, step: int) -> None:
        self.mark()
        if self._is_measured:
            is_first = self._num_begun == 1  # it compiled, allocated and connected
            count = 0 if is_first else self._num_micro_batches
            num_steps, self._num_reported = self._num_begun - self._num_reported, self._num_begun
            self._unread.append(_MeasuredStep(step, self._moments, count, self._begun_at, is_first, num_steps))

    def flush(self) -> None:
        if self._record is not None and self._unread:
            self._unread[-1].moments[-1].synchronize()  # or a timeline would lack the last step
        self._read()

    def _read(self) -> Timing:
        timing = NOT_MEASURED
        feed_s = 0.0
        while self._unread and self._unread[0].moments[-1].query():
            step = self._unread.popleft()
            if not step.is_first:
                feed_s += step.feed_s
                timing = step.timing()._replace(feed=feed_s)
            if self._record is not None:
                self._record(step.number, self._clock.times_of(step))
        return timing


class _MeasuredStep(NamedTuple):
    """begun_at: the host's time when the first event was recorded. num_steps: this one and unmeasured ones before."""

    number: int
    moments: list[torch.cuda.Event]
    num_micro_batches: int
    begun_at: float
    is_first: bool
    num_steps: int

    def timing(self) -> Timing:
        *passes, sent, received, ended, _ = self.moments[_FIRST_PASS:]
        begun = passes[::_PASS]
        in_passes = sum(_seconds(*ends) for ends in zip(begun, passes[_PASS - 1 :: _PASS], strict=True))
        data = sum(_seconds(*ends) for ends in zip(begun, passes[1::_PASS], strict=True))
        sync, rest = _seconds(sent, received), _seconds(self.moments[1], sent) - in_passes + _seconds(received, ended)
        count = self.num_micro_batches
        return Timing(in_passes / count if count else 0.0, sync, max(rest, 0.0), data / count if count else 0.0)

    @property
    def feed_s(self) -> float:
        return self.num_steps * _seconds(*self.moments[:2])


class _DeviceClock:
    """Converts the device's event times to the host's clock, step by step.

    An event is never reached before it was recorded, nor after the host saw it reached. So the clocks cannot drift.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None
        self._last_s = 0.0

    def times_of(self, step: _MeasuredStep) -> list[float]:
        """Host times of the events of a step that the device has just completed."""
        first, *later = step.moments
        since_first = [0.0, *(_seconds(first, moment) for moment in later)]
        counted_s = step.begun_at if self._last is None else self._last_s + _seconds(self._last, first)
        begun_s = max(min(counted_s, perf_counter() - since_first[-1]), step.begun_at)
        self._last, self._last_s = first, begun_s
        return [begun_s + seconds for seconds in since_first]


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) / 1e3


def stopwatch_for(device: torch.device, recorder: Recorder, interval: int = 1) -> HostStopwatch | CudaStopwatch:
    """interval: measure one of this many steps; a timeline measures every step."""
    return (CudaStopwatch if device.type == "cuda" else HostStopwatch)(recorder, interval)


class TimeTotals:
    """Adds up the times of all workers. Reads many steps at a time, when their numbers have arrived from the GPU.

    add: takes a completed step's plan, number of samples, and numbers.
    """

    def __init__(self, num_workers: int) -> None:
        self._totals = [_Total() for _ in range(num_workers)]
        self._reader = DeferredReader(self._read, batch=STEPS_PER_READ, is_ready=lambda step: step[2].has_arrived)
        self.add = self._reader.add
        self._steps = 0
        self._samples = 0
        self._sync_s = 0.0

    def report(self) -> Report:
        self._reader.flush()
        num_micro_batches = sum(total.micro_batches for total in self._totals)
        wall_s = self._sync_s + max(total.compute_s + total.waiting_s + total.rest_s for total in self._totals)
        sum_of_speeds = sum(total.speed for total in self._totals)
        samples_per_micro_batch = ratio(self._samples, num_micro_batches)
        workers = tuple(
            WorkerReport(
                rank=rank,
                share=ratio(total.micro_batches, num_micro_batches),
                samples_per_s=total.speed * samples_per_micro_batch,
                compute_s=total.compute_s,
                waiting_s=total.waiting_s,
                sync_s=self._sync_s,
                rest_s=total.rest_s,
            )
            for rank, total in enumerate(self._totals)
        )
        efficiency = ratio(num_micro_batches, wall_s * sum_of_speeds)
        return Report(self._steps, ratio(self._samples, wall_s), efficiency, workers)

    def regroup(self, previous_ranks: Sequence[int | None]) -> None:
        """Count for other workers from now on. previous_ranks: by rank, None for a new worker."""
        self._reader.flush()
        self._totals = [_Total() if rank is None else self._totals[rank] for rank in previous_ranks]

    def _read(self, step: tuple[Plan, int, Numbers]) -> None:
        plan, num_samples, numbers = step
        self._steps += 1
        self._samples += num_samples
        timings = numbers.timings
        sync_s, waiting_s = split_sync([timing.sync for timing in timings])
        self._sync_s += sync_s
        for total, own, timing, waited_s in zip(self._totals, plan, timings, waiting_s, strict=True):
            total.add(len(own), timing, waited_s)
            if len(timings) == 1:  # nobody to wait for: it has read the step itself
                total.rest_s += timing.feed
            else:
                total.waiting_s += timing.feed


class _Total:
    """One worker's sums."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self.compute_s = self.waiting_s = self.rest_s = 0.0
        self._micro_batch_s = 0.0  # as last measured
        self._unmeasured_steps = 0

    def add(self, micro_batches: int, timing: Timing, waiting_s: float) -> None:
        self.micro_batches += micro_batches
        self._micro_batch_s = timing.micro_batch or self._micro_batch_s
        self.compute_s += micro_batches * self._micro_batch_s
        self.waiting_s += waiting_s
        # Not every step has a measurement: with averaging, workers report when they average.
        self._unmeasured_steps += 1
        if timing.rest:
            self.rest_s += timing.rest * self._unmeasured_steps
            self._unmeasured_steps = 0

    @property
    def speed(self) -> float:
        """Micro-batches per second while computing."""
        return ratio(self.micro_batches, self.compute_s)
