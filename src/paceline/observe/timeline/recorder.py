"""Records a worker's timeline.

The training thread only queues times that are measured anyway. A background thread writes them once a second, with
samples of the system, as one line: a killed process loses at most the last second.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time, time
from typing import Any

import torch

from paceline.core.events import Events
from paceline.core.world import World
from paceline.observe.best_effort import describe, warn
from paceline.observe.json_lines import LineWriter
from paceline.observe.timeline.files import VERSION, Sample, Span, condense_file

INTERVAL_S = 1.0
DEFAULT_MAX_BYTES = 16 << 20
# Queued items while the disk does not respond; beyond this the oldest are dropped.
MAX_QUEUED = 100_000
# Collections, hooks, plots and so on are recorded as events, with their duration, if they take longer than this.
SLOW_S = 0.01
# Temporary failures, for which the folder need not be changed.
_TEMPORARY = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE)


class Recorder:
    """Receives a worker's times, as `perf_counter` values, from any thread. The base class discards them."""

    def step(self, step: int, moments: Sequence[float]) -> None:
        """A completed step; `files.kinds_between` defines what happens between its moments."""

    def span(self, kind: str, begin: float, end: float) -> None:
        """Something outside of a step; one of `files.KINDS`."""

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Record the block as a span."""
        begin = perf_counter()
        try:
            yield
        finally:
            self.span(kind, begin, perf_counter())

    def event(self, name: str, **details: Any) -> None:
        """Something that happened now."""

    def took(self, name: str, begin: float, **details: Any) -> None:
        """Something outside of a step ends now. If it was slow, it is recorded as an event with its `seconds`.

        These events are the causes of idle gaps.
        """
        if (seconds := perf_counter() - begin) >= SLOW_S:
            self.event(name, seconds=round(seconds, 6), **details)

    def close(self) -> None:
        """The worker exits, because of the exception that is being handled if there is one."""


class NoTimeline(Recorder):
    """Records nothing."""


class TimelineRecorder(Recorder):
    """Writes this worker's file in `folder`, including `events`. A resumed run appends to it.

    The file never exceeds `max_bytes`: old steps are condensed. A full disk is a warning and does not end the run.
    """

    def __init__(self, folder: Path, world: World, events: Events, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._events = events
        self._max_bytes = max_bytes
        self._queue: deque[tuple[str, Any]] = deque(maxlen=MAX_QUEUED)
        self._path = folder / f"rank-{world.rank}.jsonl"
        self._lines = self._open(folder)
        self._sampler = SystemSampler(world.device, whole_host=world.local_rank == 0)
        self._origin = self._sampled_at = self._collection_start = perf_counter()
        session = {
            "version": VERSION,
            "rank": world.rank,
            "size": world.size,
            "host": world.host,
            "device": str(world.device),
            "pid": os.getpid(),
            "unix_time": round(time(), 6),
        }
        self._write(lambda: {"session": session})
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="paceline-timeline", daemon=True)
        self._thread.start()
        events.listen(lambda event: self.event(event.name, **event.details))
        gc.callbacks.append(self._note_collection)

    def step(self, step: int, moments: Sequence[float]) -> None:
        self._queue.append(("steps", (step, moments)))

    def span(self, kind: str, begin: float, end: float) -> None:
        step = self._events.step
        self._queue.append(("spans", Span(kind, self._microseconds(begin), self._microseconds(end), step, step)))

    def event(self, name: str, **details: Any) -> None:
        self._queue.append(("events", (name, self._events.step, self._microseconds(perf_counter()), details)))

    def close(self) -> None:
        if self._closing.is_set():
            return
        if error := sys.exception():
            text = str(error).strip().split("\n", 1)[0]
            # A requested stop is a SystemExit.
            self.event("stop" if isinstance(error, SystemExit) else "fault", error=type(error).__name__, text=text)
        gc.callbacks.remove(self._note_collection)
        self._closing.set()
        self._thread.join()
        self._write(self._take_queue)
        self._write(lambda: {"end": self._microseconds(perf_counter())})
        if self._lines is not None:
            self._lines.close()

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._collection_start = perf_counter()
        else:
            self.took("garbage collection", self._collection_start)

    def _microseconds(self, moment: float) -> int:
        return int((moment - self._origin) * 1e6)

    def _work(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            self._write(self._take_queue)

    def _take_queue(self) -> dict[str, Any]:
        block: dict[str, list[Any]] = {}
        for _ in range(len(self._queue)):
            name, item = self._queue.popleft()
            if name == "steps":
                # Rounded before subtracting, so that rounding errors do not add up.
                at = [self._microseconds(moment) for moment in item[1]]
                item = [item[0], at[0], *(later - earlier for earlier, later in pairwise(at))]
            block.setdefault(name, []).append(item)
        before, self._sampled_at = self._sampled_at, perf_counter()
        seconds = round(self._sampled_at - before, 3)
        block["samples"] = [Sample(self._microseconds(self._sampled_at), seconds, self._sampler.sample())]
        return block

    def _open(self, folder: Path) -> LineWriter | None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and not _has_this_version(self._path):
                self._path.rename(self._path.with_suffix(".jsonl.old"))
            return LineWriter(self._path)
        except OSError as error:
            if error.errno not in _TEMPORARY:
                raise ValueError(
                    f"timeline={str(folder)!r} cannot be written to ({error.strerror}): choose another folder"
                ) from error
            self._warn(error)
            return None

    def _write(self, make_record: Callable[[], dict[str, Any]]) -> None:
        """Best effort: the first failure ends the timeline."""
        if self._lines is None:
            return
        try:
            self._lines.write(make_record())
            if self._path.stat().st_size > self._max_bytes:
                condense_file(self._path, self._max_bytes)
                self._lines.close()
                self._lines = LineWriter(self._path)
        except Exception as error:
            self._lines.close()
            self._lines = None
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        warn(f"{self._path} cannot be written, the timeline ends here, training continues: {describe(error)}")


class SystemSampler:
    """CPU, memory and GPU utilization of a worker, from /proc and, if nvidia-ml-py is installed, from the driver.

    Best effort: a value that cannot be read is left out. whole_host: sample the host too; one worker per host does so.
    """

    def __init__(self, device: torch.device, *, whole_host: bool) -> None:
        self._device = device
        self._whole_host = whole_host
        self._last = 0.0, 0.0
        self._last_ticks = 0, 0
        self.sample()

    def sample(self) -> dict[str, float]:
        """The values of a `Sample`. CPU utilization is the mean since the previous sample."""
        readers = {"cpu": self._cpu, "memory": _memory}
        if self._whole_host:
            readers |= {"host_cpu": self._host_cpu, "host_memory": _host_memory}
        found = {}
        for name, read in readers.items():
            with suppress(OSError, ValueError, LookupError, ZeroDivisionError):
                found[name] = read()
        if self._device.type == "cuda":
            try:
                found["gpu"] = float(torch.cuda.utilization(self._device))
                found["gpu_memory"] = float(torch.cuda.device_memory_used(self._device))
            except Exception:  # package, library, permission or device is missing
                found["gpu_memory"] = float(torch.cuda.memory_reserved(self._device))
        return found

    def _cpu(self) -> float:
        (before_s, used_before_s), self._last = self._last, (perf_counter(), process_time())
        return round(100 * (self._last[1] - used_before_s) / (self._last[0] - before_s), 1)

    def _host_cpu(self) -> float:
        """Without idle and waiting for I/O, in the kernel's ticks since boot."""
        with Path("/proc/stat").open() as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
        (busy, total), self._last_ticks = self._last_ticks, (sum(ticks) - ticks[3] - ticks[4], sum(ticks))
        return round(100 * (self._last_ticks[0] - busy) / (self._last_ticks[1] - total), 1)


def _memory() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _host_memory() -> float:
    """Memory in use that cannot be reclaimed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines[:3]}
    return 1024 * (kilobytes["MemTotal"] - kilobytes["MemAvailable"])


def _has_this_version(path: Path) -> bool:
    """Whether a file can be appended to: an earlier Paceline may have written it."""
    with path.open("rb") as file:  # bytes: a damaged file may not be text
        first = file.readline()
    try:
        return bool(json.loads(first)["session"]["version"] == VERSION)
    except (ValueError, KeyError, TypeError):  # empty, damaged, or truncated
        return True
