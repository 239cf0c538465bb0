"""Where a worker's time goes in a step: its micro-batches, the exchange, the rest."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Protocol

import torch

from paceline.core.timing import NOT_MEASURED, Timing


class Stopwatch(Protocol):
    """Per step: `begin_step`; per pass over micro-batches `start`, before its data is read, and `stop`, after its
    backward; then `send` and, around the exchange and the optimizer, `received` and `end_step`."""

    def begin_step(self) -> None: ...

    def start(self) -> None: ...

    def stop(self, num_micro_batches: int = 1) -> None: ...

    def send(self) -> Timing:
        """The exchange begins. What is known by now: of this step and the one before, or on a GPU of earlier ones."""

    def received(self) -> None: ...

    def end_step(self) -> None: ...


class HostStopwatch:
    """For devices whose work is done when the call returns."""

    def __init__(self) -> None:
        self._sync = self._rest = 0.0
        self._is_first = True

    def begin_step(self) -> None:
        self._begun = perf_counter()
        self._seconds, self._count = 0.0, 0

    def start(self) -> None:
        self._started = perf_counter()

    def stop(self, num_micro_batches: int = 1) -> None:
        self._seconds += perf_counter() - self._started
        self._count += num_micro_batches

    def send(self) -> Timing:
        self._sent = perf_counter()
        return Timing(self._seconds / self._count if self._count else 0.0, self._sync, self._rest)

    def received(self) -> None:
        self._received = perf_counter()

    def end_step(self) -> None:
        if self._is_first:  # it made the optimizer's state and the connections, which no later step will
            self._is_first = False
            return
        self._sync = self._received - self._sent
        self._rest = self._sent - self._begun - self._seconds + perf_counter() - self._received


class CudaStopwatch:
    """For work that is queued: marks in the stream, read when the device has passed them. Nobody waits for that."""

    def __init__(self) -> None:
        self._steps: deque[_Marks] = deque()
        self._is_first = True

    def begin_step(self) -> None:
        self._marks = _Marks()

    def start(self) -> None:
        self._marks.passes.append(_mark())

    def stop(self, num_micro_batches: int = 1) -> None:
        self._marks.passes.append(_mark())
        self._marks.count += num_micro_batches

    def send(self) -> Timing:
        self._marks.sent = _mark()
        timing = NOT_MEASURED
        while self._steps and self._steps[0].ended.query():
            timing = self._steps.popleft().timing()
        return timing

    def received(self) -> None:
        self._marks.received = _mark()

    def end_step(self) -> None:
        self._marks.ended = _mark()
        if not self._is_first:  # which compiled, allocated and connected
            self._steps.append(self._marks)
        self._is_first = False


class _Marks:
    """One step's places in the stream."""

    sent: torch.cuda.Event
    received: torch.cuda.Event
    ended: torch.cuda.Event

    def __init__(self) -> None:
        self.begun = _mark()
        self.passes: list[torch.cuda.Event] = []
        self.count = 0

    def timing(self) -> Timing:
        in_passes = sum(_seconds(a, b) for a, b in zip(self.passes[::2], self.passes[1::2], strict=True))
        sync = _seconds(self.sent, self.received)
        rest = _seconds(self.begun, self.sent) - in_passes + _seconds(self.received, self.ended)
        return Timing(in_passes / self.count if self.count else 0.0, sync, max(rest, 0.0))


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) / 1e3


def stopwatch_for(device: torch.device) -> Stopwatch:
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()
