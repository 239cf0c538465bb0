"""Recording what a worker's time goes into, without taking any of it.

The training thread only puts moments aside that were measured anyway. A thread writes them down once a second, with
samples of the system: one line, by one system call, so that a process that is killed loses the last second and no more.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from time import perf_counter, time
from typing import Any, Protocol

from paceline.core.events import Event, Events
from paceline.core.world import World
from paceline.observe.best_effort import describe, warn
from paceline.observe.json_lines import LineWriter
from paceline.observe.system_samples import SystemSampler
from paceline.observe.timeline.condensing import condense_file
from paceline.observe.timeline.layout import VERSION

INTERVAL_S = 1.0
DEFAULT_MAX_BYTES = 16 << 20
# What waits to be written while a disk does not answer; beyond that the oldest is given up.
MAX_WAITING = 100_000
NOTED_GARBAGE_S = 0.01
# Not the folder's fault: the disk is full or fails, or the process has too many files open.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE)


class Recorder(Protocol):
    """Takes what a worker measured. Times are those of `perf_counter`. Safe from any thread."""

    def step(self, step: int, moments: Sequence[float]) -> None:
        """A completed step, by its moments; `layout.kinds_between` says what lies between them."""

    def span(self, kind: str, begin: float, end: float) -> None:
        """Something beside the steps, one of `layout.KINDS`."""

    def during(self, kind: str) -> AbstractContextManager[None]:
        """The block is a span."""

    def event(self, name: str, **details: Any) -> None: ...

    def close(self) -> None:
        """The worker leaves, because of an error if one is under way."""


class NoTimeline:
    """Nobody asked for a timeline."""

    def step(self, step: int, moments: Sequence[float]) -> None:
        return

    def span(self, kind: str, begin: float, end: float) -> None:
        return

    def during(self, kind: str) -> AbstractContextManager[None]:
        return nullcontext()

    def event(self, name: str, **details: Any) -> None:
        return

    def close(self) -> None:
        return


class TimelineRecorder:
    """Writes this worker's file in `folder`; a run that goes on adds to it. `events` are written down too.

    The file never grows beyond `max_bytes`: what is long past is condensed. A disk that refuses ends the recording
    with a warning, and not the run.
    """

    def __init__(self, folder: Path, world: World, events: Events, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._events = events
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[str, Any]] = deque(maxlen=MAX_WAITING)
        self._path = folder / f"rank-{world.rank}.jsonl"
        self._lines: LineWriter | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = LineWriter(self._path)
        except OSError as error:
            if error.errno not in _PASSING:
                raise ValueError(
                    f"timeline={str(folder)!r} cannot be written to ({error.strerror}): choose another folder"
                ) from error
            self._give_up(error)
        self._sampler = SystemSampler(world.device, whole_host=world.local_rank == 0)
        self._origin = self._sampled = perf_counter()
        self._write({"session": _session(world, time())})
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="paceline-timeline", daemon=True)
        self._thread.start()
        events.listen(self._take_event)
        self._collecting_since = self._origin
        gc.callbacks.append(self._note_garbage)

    def step(self, step: int, moments: Sequence[float]) -> None:
        self._waiting.append(("steps", (step, moments)))

    def span(self, kind: str, begin: float, end: float) -> None:
        start = self._microseconds(begin)
        self._waiting.append(("spans", [kind, self._events.step, start, self._microseconds(end) - start]))

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        begin = perf_counter()
        try:
            yield
        finally:
            self.span(kind, begin, perf_counter())

    def event(self, name: str, **details: Any) -> None:
        self._waiting.append(("events", [name, self._events.step, self._microseconds(perf_counter()), details]))

    def close(self) -> None:
        if self._closing.is_set():
            return
        if error := sys.exception():
            text = str(error).strip().split("\n", 1)[0]
            # A run that was asked to stop leaves by a SystemExit.
            self.event("stop" if isinstance(error, SystemExit) else "fault", error=type(error).__name__, text=text)
        gc.callbacks.remove(self._note_garbage)
        self._closing.set()
        self._thread.join()
        self._flush()
        self._write({"end": self._microseconds(perf_counter())})
        if self._lines is not None:
            with suppress(OSError):
                self._lines.close()

    def _take_event(self, event: Event) -> None:
        self.event(event.name, **event.details)

    def _note_garbage(self, phase: str, info: dict[str, int]) -> None:
        """A full collection stops the worker at a moment that nobody chose: one that took its time is an event."""
        if info["generation"] < 2:
            return
        if phase == "start":
            self._collecting_since = perf_counter()
        elif (seconds := perf_counter() - self._collecting_since) >= NOTED_GARBAGE_S:
            self.event("garbage collection", seconds=round(seconds, 3))

    def _microseconds(self, moment: float) -> int:
        return int((moment - self._origin) * 1e6)

    def _work(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            self._flush()

    def _flush(self) -> None:
        try:
            self._write_block()
            self._condense()
        except Exception as error:
            self._give_up(error)

    def _write_block(self) -> None:
        block: dict[str, list[Any]] = {}
        for _ in range(len(self._waiting)):
            name, item = self._waiting.popleft()
            block.setdefault(name, []).append(self._encoded(*item) if name == "steps" else item)
        block["samples"] = [self._sample()]
        self._write(block)

    def _encoded(self, step: int, moments: Sequence[float]) -> list[int]:
        """Rounded before they are subtracted, so that the step's end is not off by the sum of its roundings."""
        at = [int((moment - self._origin) * 1e6) for moment in moments]
        return [step, at[0], *(later - earlier for earlier, later in pairwise(at))]

    def _sample(self) -> list[float | None]:
        before, self._sampled = self._sampled, perf_counter()
        values = self._sampler.sample()
        return [self._microseconds(self._sampled), round(self._sampled - before, 3), *values]

    def _write(self, record: dict[str, Any]) -> None:
        if self._lines is None:
            return
        try:
            self._lines.write(record)
        except Exception as error:
            self._give_up(error)

    def _condense(self) -> None:
        if self._lines is not None and self._path.stat().st_size > self._max_bytes:
            self._lines.close()
            condense_file(self._path, self._max_bytes)
            self._lines = LineWriter(self._path)

    def _give_up(self, error: Exception) -> None:
        warn(f"the timeline ends here, training goes on: {self._path}: {describe(error)}")
        if self._lines is not None:
            with suppress(OSError):
                self._lines.close()
        self._lines = None


def _session(world: World, unix_time: float) -> dict[str, Any]:
    return {
        "version": VERSION,
        "rank": world.rank,
        "size": world.size,
        "host": world.host,
        "device": str(world.device),
        "pid": os.getpid(),
        "unix_time": round(unix_time, 6),
    }
