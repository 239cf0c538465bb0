"""Measures where a worker's time goes in a step: micro-batches, exchange, rest."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Protocol

import torch

from paceline.core.timing import NOT_MEASURED, Timing
from paceline.observe.timeline.recorder import NoTimeline, Recorder


class Stopwatch(Protocol):
    """Calls per step: `begin_step`, `ready` (the plan is known); per pass over micro-batches `start`, `ready` (the data
    arrived), `stop` (backward is done); then `send`, `received` (the exchange is done), `end_step` (the optimizer is
    done) and `completed` (replicas are averaged, if they are). A recorder gets the times of completed steps.
    """

    def begin_step(self) -> None: ...

    def ready(self) -> None: ...

    def start(self) -> None: ...

    def stop(self, num_micro_batches: int = 1) -> None: ...

    def send(self) -> Timing:
        """The exchange begins. Returns the latest known timing: of this step, or on a GPU of an earlier one."""

    def received(self) -> None: ...

    def end_step(self) -> None: ...

    def completed(self, step: int) -> None: ...

    def flush(self) -> None:
        """Record the steps that the device has completed; no further step may follow."""


class HostStopwatch:
    """For devices whose operations are synchronous."""

    # A timeline overrides it to record the times.
    _now = staticmethod(perf_counter)

    def __init__(self) -> None:
        self._sync = self._rest = 0.0
        self._is_first = True

    def begin_step(self) -> None:
        self._begun = self._now()
        self._seconds, self._count = 0.0, 0

    def ready(self) -> None:
        return

    def start(self) -> None:
        self._started = self._now()

    def stop(self, num_micro_batches: int = 1) -> None:
        self._seconds += self._now() - self._started
        self._count += num_micro_batches

    def send(self) -> Timing:
        self._sent = self._now()
        return Timing(self._seconds / self._count if self._count else 0.0, self._sync, self._rest)

    def received(self) -> None:
        self._received = self._now()

    def end_step(self) -> None:
        ended = self._now()
        if self._is_first:  # includes one-time work: optimizer state, connections
            self._is_first = False
            return
        self._sync = self._received - self._sent
        self._rest = self._sent - self._begun - self._seconds + ended - self._received

    def completed(self, step: int) -> None:
        return

    def flush(self) -> None:
        return


class RecordingHostStopwatch(HostStopwatch):
    """Also records all times of a step, for a timeline."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def begin_step(self) -> None:
        self._moments: list[float] = []
        super().begin_step()

    def ready(self) -> None:
        self._now()

    def completed(self, step: int) -> None:
        self._now()
        self._recorder.step(step, self._moments)

    def _now(self) -> float:
        now = perf_counter()
        self._moments.append(now)
        return now


class CudaStopwatch:
    """For queued work: events in the stream, read once the device has passed them, without waiting.

    Recording an event costs the host as much as a small kernel, so only one of `interval` steps is measured.
    """

    def __init__(self, interval: int = 1) -> None:
        self._steps: deque[_Marks] = deque()
        self._interval = interval
        self._num_begun = 0

    def begin_step(self) -> None:
        self._is_measured = self._num_begun < 2 * self._interval or self._num_begun % self._interval == 0
        self._num_begun += 1
        if self._is_measured:
            self._marks = _Marks()

    def ready(self) -> None:
        return

    def start(self) -> None:
        if self._is_measured:
            self._marks.passes.append(self._marks.set())

    def stop(self, num_micro_batches: int = 1) -> None:
        if self._is_measured:
            self._marks.passes.append(self._marks.set())
            self._marks.count += num_micro_batches

    def send(self) -> Timing:
        if self._is_measured:
            self._marks.sent = self._marks.set()
        timing = NOT_MEASURED
        while self._steps and self._steps[0].ended.query():
            timing = self._steps.popleft().timing()
        return timing

    def received(self) -> None:
        if self._is_measured:
            self._marks.received = self._marks.set()

    def end_step(self) -> None:
        if self._is_measured:
            self._marks.ended = self._marks.set()
            if self._num_begun > 1:  # the first compiled, allocated and connected
                self._steps.append(self._marks)

    def completed(self, step: int) -> None:
        return

    def flush(self) -> None:
        return


class RecordingCudaStopwatch(CudaStopwatch):
    """Also records events at all times of a step, for a timeline."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._clock = _DeviceClock()
        self._unread: deque[_Moments] = deque()

    def begin_step(self) -> None:
        super().begin_step()
        self._moments = _Moments(self._marks.begun)

    def ready(self) -> None:
        self._moments.marks.append(self._marks.set())

    def start(self) -> None:
        super().start()
        self._moments.marks.append(self._marks.passes[-1])

    def stop(self, num_micro_batches: int = 1) -> None:
        super().stop(num_micro_batches)
        self._moments.marks.append(self._marks.passes[-1])

    def send(self) -> Timing:
        timing = super().send()
        self._moments.marks.append(self._marks.sent)
        self.flush()
        return timing

    def completed(self, step: int) -> None:
        self._moments.marks += (self._marks.received, self._marks.ended, self._marks.set())
        self._moments.step = step
        self._unread.append(self._moments)

    def flush(self) -> None:
        while self._unread and self._unread[0].marks[-1].query():
            moments = self._unread.popleft()
            self._recorder.step(moments.step, self._clock.times_of(moments))


class _Marks:
    """The events of one step."""

    sent: torch.cuda.Event
    received: torch.cuda.Event
    ended: torch.cuda.Event

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()  # looked up once: that takes longer than recording an event
        self.begun = self.set()
        self.passes: list[torch.cuda.Event] = []
        self.count = 0

    def set(self) -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(self._stream)
        return mark

    def timing(self) -> Timing:
        in_passes = sum(_seconds(a, b) for a, b in zip(self.passes[::2], self.passes[1::2], strict=True))
        sync = _seconds(self.sent, self.received)
        rest = _seconds(self.begun, self.sent) - in_passes + _seconds(self.received, self.ended)
        return Timing(in_passes / self.count if self.count else 0.0, sync, max(rest, 0.0))


class _Moments:
    """All events of one step, in order. `set_at`: the host's time when the first was recorded."""

    def __init__(self, begun: torch.cuda.Event) -> None:
        self.marks = [begun]
        self.set_at = perf_counter()
        self.step = 0


class _DeviceClock:
    """Converts the device's event times to the host's clock, step by step.

    An event is never reached before it was recorded, nor after the host saw it reached. So the clocks cannot drift.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None
        self._last_s = 0.0

    def times_of(self, moments: _Moments) -> list[float]:
        """Host times of the events of a step that the device has just completed."""
        first, *later = moments.marks
        since_first = [0.0, *(_seconds(first, mark) for mark in later)]
        counted_s = moments.set_at if self._last is None else self._last_s + _seconds(self._last, first)
        begun_s = max(min(counted_s, perf_counter() - since_first[-1]), moments.set_at)
        self._last, self._last_s = first, begun_s
        return [begun_s + seconds for seconds in since_first]


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) / 1e3


def stopwatch_for(device: torch.device, recorder: Recorder, interval: int = 1) -> Stopwatch:
    """interval: on a GPU, measure one of so many steps; a timeline measures every step."""
    if isinstance(recorder, NoTimeline):
        return CudaStopwatch(interval) if device.type == "cuda" else HostStopwatch()
    return RecordingCudaStopwatch(recorder) if device.type == "cuda" else RecordingHostStopwatch(recorder)
