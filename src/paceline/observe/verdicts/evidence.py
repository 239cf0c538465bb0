"""The data for verdicts: a run's recent lines of metrics, its events, and facts about its workers. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from operator import mul
from statistics import median
from typing import Any, NamedTuple

from paceline.core.events import Event
from paceline.observe.json_lines import is_count, is_number, number_or_none
from paceline.observe.metrics import RESUMED_FROM, is_resume

# Recent lines: at least MIN_LINES, and enough to cover RECENT_S, at most MAX_LINES.
MIN_LINES, RECENT_S, MAX_LINES = 3, 2.0, 50
# A line about a longer time is damaged.
MAX_SECONDS = 1e9
# The number of newest lines that are kept.
MAX_KEPT_LINES = 256


class WorkerPart(NamedTuple):
    """How one worker spent the time since the previous line, in fractions, 0 to 1; None: not logged.

    micro_batches: computed by it. speed: micro-batches per second while working on them, waiting for their data
    included. computing, data (waiting for it), waiting (for slower workers) and exchange add up to at most 1; the
    remainder is everything else.
    """

    micro_batches: float = 0.0
    speed: float | None = None
    computing: float | None = None
    data: float | None = None
    waiting: float | None = None
    exchange: float | None = None

    def micro_batch_s(self, seconds: float) -> float | None:
        """Seconds per micro-batch, waiting for data included; None without a micro-batch, or if unknown.

        If no speed was logged, all the time that was not spent waiting for others counts.
        """
        if self.speed is not None:
            return 1 / self.speed if self.speed > 0 else None
        if self.waiting is None or not self.micro_batches:
            return None
        return (1 - self.waiting) * seconds / self.micro_batches

    @property
    def data_per_work(self) -> float | None:
        """The fraction of the time per micro-batch spent waiting for data."""
        if self.computing is None or self.data is None:
            return None
        return self.data / (self.computing + self.data) if self.computing + self.data else None


@dataclass(frozen=True)
class Line:
    """A line of metrics. since_step, seconds: the step of the previous line, and the time since; 0 for the first."""

    step: int
    since_step: int
    seconds: float
    loss: float | None = None
    lr: float | None = None
    samples_per_s: float | None = None
    workers: Sequence[WorkerPart] = ()

    def micro_batch_s(self, rank: int) -> float | None:
        return self.workers[rank].micro_batch_s(self.seconds)

    @cached_property
    def ratios(self) -> list[float]:
        """By rank: the time per micro-batch over the median of the other workers; 1 if unknown."""
        own = [self.micro_batch_s(rank) for rank in range(len(self.workers))]
        known = sorted(filter(None, own))
        return [s / _median_without(known, s) if s and len(known) > 1 else 1.0 for s in own]

    def computing_s(self, rank: int) -> float | None:
        """A worker's seconds per micro-batch without waiting for data."""
        total_s, data = self.micro_batch_s(rank), self.workers[rank].data_per_work
        return None if total_s is None or data is None else total_s * (1 - data)


@dataclass(frozen=True)
class WorkerFacts:
    """Facts about a worker besides its times; None: unknown.

    silent_s: seconds since it last wrote its status, which it does every second. gpu, cpu: utilization in percent, of
    the GPU and of one core.
    """

    host: str = ""
    device: str = ""
    silent_s: float | None = None
    gpu: float | None = None
    cpu: float | None = None
    gpu_memory_bytes: float | None = None
    gpu_memory_total_bytes: float | None = None


@dataclass(frozen=True)
class Evidence:
    """The known facts about a run.

    state, reason: as `paceline logs list` shows them. lines: the newest, in order. is_whole: whether they begin with
    the run's first line. first_loss: of the run's first line. world_event: the newest one. silent_s: since the last
    line was written, or since the run was started again; None without a status or a line. is_starting: it was, and has
    written fewer than `MIN_LINES` lines since. settings: by flat name, such as "trainer.readers". host_memory_bytes,
    host_memory_total_bytes, cores: of the first worker's host.
    """

    state: str = "live"
    reason: str | None = None
    lines: Sequence[Line] = ()
    is_whole: bool = True
    first_loss: float | None = None
    world_event: Event | None = None
    workers: Sequence[WorkerFacts] = ()
    silent_s: float | None = None
    is_starting: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    host_memory_bytes: float | None = None
    host_memory_total_bytes: float | None = None
    cores: int | None = None

    @cached_property
    def newest_change(self) -> Event | None:
        """`world_event`, unless the run was stopped since, and resumed with more workers."""
        event, newest = self.world_event, next((line for line in reversed(self.lines) if line.workers), None)
        size: Any = None if event is None else event.details.get("size")
        if event is None or newest is None or not is_count(size):
            return event
        return None if newest.since_step >= event.step and len(newest.workers) > size else event

    @property
    def num_workers(self) -> int:
        """The current number: workers may have left."""
        size: Any = None if self.newest_change is None else self.newest_change.details.get("size")
        if is_count(size):
            return int(size)
        return next((len(line.workers) for line in reversed(self.lines) if line.workers), len(self.workers))

    def facts(self, rank: int) -> WorkerFacts:
        return self.workers[rank] if rank < len(self.workers) else WorkerFacts()

    def name(self, rank: int) -> str:
        """ "worker 3", and "worker 3 on host b" if the workers are on several hosts."""
        host = self.facts(rank).host
        has_several = len({worker.host for worker in self.workers}) > 1
        return f"worker {rank} on host {host}" if has_several and host else f"worker {rank}"

    def timed(self) -> Iterator[Line]:
        """The newest lines with a known time, from the last one back to the last change of the number of workers."""
        count = None
        for line in reversed(self.lines):
            if line.workers and 0 < line.seconds < MAX_SECONDS:
                if count not in (None, len(line.workers)):
                    return
                count = len(line.workers)
                yield line

    @cached_property
    def recent(self) -> Sequence[Line]:
        """The last of `timed`, in order; empty if there are too few."""
        kept, seconds = list[Line](), 0.0
        for line in self.timed():
            if len(kept) >= MAX_LINES or (len(kept) >= MIN_LINES and seconds >= RECENT_S):
                break
            kept.append(line)
            seconds += line.seconds
        return kept[::-1] if len(kept) >= MIN_LINES else ()

    @cached_property
    def parts(self) -> list[WorkerPart]:
        """By rank: the means over the recent lines, without a speed. A part is None unless all lines have it."""
        seconds = [line.seconds for line in self.recent]
        total_s, found = sum(seconds), []
        for parts in zip(*(line.workers for line in self.recent), strict=True):
            counts, _, *columns = zip(*parts, strict=True)
            means = (None if None in column else sum(map(mul, column, seconds)) / total_s for column in columns)
            found.append(WorkerPart(sum(counts), None, *means))
        return found


class Lines:
    """The newest lines of metrics.jsonl, added as they are read; without damaged fields and lines without a step."""

    def __init__(self, records: Sequence[Mapping[str, Any]] = ()) -> None:
        self._lines: deque[tuple[Line, float]] = deque(maxlen=MAX_KEPT_LINES)  # with their times
        self.num_since_resume = MIN_LINES  # or more; of a run that was not resumed, too
        self.add(records)

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            if is_resume(record):
                self.num_since_resume = 0
                while self._lines and self._lines[-1][0].step > record[RESUMED_FROM]:
                    self._lines.pop()  # superseded
            if not is_count(record.get("step")) or _finite(record.get("time")) is None:
                continue
            if "loss" not in record and "samples_per_s" not in record:
                continue  # an evaluation: its time counts for the next line
            now = float(record["time"])
            before, time = (self._lines[-1][0].step, self._lines[-1][1]) if self._lines else (0, now)
            numbers = {name: number_or_none(record.get(name)) for name in ("loss", "lr", "samples_per_s")}
            line = Line(record["step"], before, max(now - time, 0.0), **numbers, workers=_parts(record))
            self._lines.append((line, now))
            self.num_since_resume += 1

    def newest(self) -> list[Line]:
        return [line for line, _ in self._lines]


def median_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of the other values."""
    place, count = bisect_left(ordered, value), len(ordered)
    low, high = (i + (i >= place) for i in ((count - 2) // 2, (count - 1) // 2))
    return (ordered[low] + ordered[high]) / 2


def _finite(value: Any) -> float | None:
    return float(value) if is_number(value) and isfinite(value) else None


def _parts(record: Mapping[str, Any]) -> list[WorkerPart]:
    lanes = record.get("lanes")
    values = {**record, **lanes} if isinstance(lanes, dict) else record
    found = [values.get(name) for name in ("shares", "speeds", "computing", "data", "waiting", "exchange")]
    columns = [[*map(_finite, value)] if isinstance(value, list) else [] for value in found]
    count = len(columns[0] or columns[2])  # a single worker has no shares
    known = (column if len(column) == count else [None] * count for column in columns)
    return [WorkerPart(share or 0.0, *others) for share, *others in zip(*known, strict=True)]
