"""How long a worker takes for a micro-batch, waiting for data included."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Per micro-batch `start`, before its data is read, and `stop`, after its backward; per step `reading`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def reading(self) -> float:
        """Seconds per micro-batch in the newest step that could be measured since the last call; 0.0 if in none."""


class HostStopwatch:
    """For devices whose work is done when the call returns."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._count = 0

    def start(self) -> None:
        self._started = perf_counter()

    def stop(self) -> None:
        self._seconds += perf_counter() - self._started
        self._count += 1

    def reading(self) -> float:
        mean = self._seconds / self._count if self._count else 0.0
        self._seconds, self._count = 0.0, 0
        return mean


class CudaStopwatch:
    """For work that is queued: marks in the stream, read when the device has passed them. Nobody waits for that."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []
        self._steps: deque[list[torch.cuda.Event]] = deque()

    def start(self) -> None:
        self._mark()

    def stop(self) -> None:
        self._mark()

    def reading(self) -> float:
        if self._marks:
            self._steps.append(self._marks)
            self._marks = []
        mean_ms = 0.0
        while self._steps and self._steps[0][-1].query():
            marks = self._steps.popleft()
            pairs = list(zip(marks[::2], marks[1::2], strict=True))
            mean_ms = sum(begin.elapsed_time(end) for begin, end in pairs) / len(pairs)
        return mean_ms / 1e3

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)


def stopwatch_for(device: torch.device) -> Stopwatch:
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()
