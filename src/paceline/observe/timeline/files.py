"""The files of a timeline: `rank-0.jsonl` and so on, one per worker; see paceline.observe.json_lines.

A session is one process's part of a run. Times are whole microseconds since the session began. A line is one of
    {"session": {...}}         a worker starts: its rank, host and device, and the Unix time of its microsecond 0
    {"steps": [...], "spans": [...], "events": [...], "samples": [...]}      the last second or so
    {"end": microseconds}      the session ended, normally or by an error
where
    a step is       [step, start, then the time from each of its moments to the next]
    a span is       [kind, start, end, step, first step]
    an event is     [name, step, time, details]
    a sample is     [time, seconds it covers, {name: value}]

Condensing keeps a file small. The newer half is left alone. Older steps are summed over 16, 32, 64 or more steps: one
span per kind, end to end. Older samples become means over longer times. This is repeated until they fit into a quarter
of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from paceline.observe.json_lines import LineReader, parse_lines, replace_file, to_json

VERSION = 2
# The activities of a worker. "sync": the exchange of gradients, "average": of replicas. "wait", for slower workers, is
# separated from them when the file is read. "writing": a checkpoint being written to disk in the background.
KINDS = ("compute", "data", "wait", "sync", "average", "optimizer", "checkpoint", "evaluation", "other", "writing")
# The values that are sampled every second, with titles and units.
SAMPLED = {
    "gpu": ("GPU", "%"),
    "gpu_memory": ("GPU memory", "bytes"),
    "cpu": ("CPU", "% of a core"),
    "memory": ("memory", "bytes"),
    "host_cpu": ("host CPU", "%"),
    "host_memory": ("host memory", "bytes"),
}
MAX_EVENTS = 5000
# Recorded as events with their seconds, for the causes of idle gaps; they are not shown as events.
NOTED = ("hook", "logging", "plotting", "saving", "wait")

_FOLDER, _FILES = "timeline", "rank-*.jsonl"
_BEFORE, _PASS, _AFTER = ("data", ""), ("data", "compute", ""), ("sync", "optimizer", "average")
_MIN_STEPS, _MIN_SAMPLE_US = 16, 8_000_000


class Span(NamedTuple):
    """An activity. A condensed span is the sum of several, from `first_step` to `step`."""

    kind: str
    start: float
    end: float
    step: int
    first_step: int

    @property
    def duration(self) -> float:
        return self.end - self.start

    @property
    def is_condensed(self) -> bool:
        return self.first_step < self.step


class Sample(NamedTuple):
    """Means over the `seconds` before `time`, by names of SAMPLED. Values that could not be read are missing."""

    time: float
    seconds: float
    values: dict[str, float]


@dataclass
class Session:
    """One process's part of a run, as recorded. end: None unless the process recorded its end."""

    header: dict[str, Any]
    spans: list[Span] = field(default_factory=list)
    events: list[list[Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    end: int | None = None

    def __post_init__(self) -> None:
        self.rank, self.size = int(self.header["rank"]), int(self.header["size"])
        self.host, self.device = str(self.header["host"]), str(self.header["device"])
        self.unix_time = float(self.header["unix_time"])

    def add(self, line: dict[str, Any]) -> None:
        try:
            spans = [span for step in line.get("steps", ()) for span in step_spans(*step)]
            spans += [Span(*row) for row in line.get("spans", ())]
            samples = [Sample(*row) for row in line.get("samples", ())]
        except (TypeError, ValueError):  # damaged
            return
        self.spans += spans
        self.samples += samples
        self.events += line.get("events", ())
        self.end = line.get("end", self.end)

    @property
    def last_time(self) -> float:
        """The end, or the time of the last record."""
        times = [span.end for span in self.spans] + [sample.time for sample in self.samples]
        return max([self.end or 0, *times, *(float(time) for _, _, time, _ in self.events)])

    def condense(self, num_steps: int, sample_us: int) -> bytes:
        """The session as text."""
        writing = [span for span in self.spans if span.kind == "writing"]
        self.spans = merge_spans((span for span in self.spans if span.kind != "writing"), num_steps)
        self.spans += writing[-MAX_EVENTS:]
        groups = groupby(self.samples, key=lambda sample: sample.time // sample_us)
        self.samples = [mean_sample(list(group)) for _, group in groups]
        self.events = self.events[-MAX_EVENTS:]
        lines: list[dict[str, Any]] = [{"session": self.header}]
        lines.append({"spans": self.spans, "samples": self.samples, "events": self.events})
        lines += [] if self.end is None else [{"end": self.end}]
        return "".join(f"{to_json(line)}\n" for line in lines).encode()


@cache
def kinds_between(num_moments: int) -> tuple[str, ...]:
    """The activity between each two moments of a step; "" for time that belongs to no kind.

    The moments: the step begins; its plan is known; for each pass over micro-batches: it begins, its data has arrived,
    backward is done; then the exchange begins, its result has arrived, the optimizer is done, replicas are averaged.
    """
    num_passes = (num_moments - 1 - len(_BEFORE + _AFTER)) // len(_PASS)
    return _BEFORE + num_passes * _PASS + _AFTER


def step_spans(step: int, start: int, *durations: int) -> Iterator[Span]:
    for kind, duration in zip(kinds_between(len(durations) + 1), durations, strict=True):
        if kind:
            yield Span(kind, start, start + duration, step, step)
        start += duration


def in_order(spans: Iterable[Span]) -> list[Span]:
    """Sorted, without overlap and without empty spans; each step keeps one span of its optimizer.

    The host runs ahead of its GPU: its activity between two steps starts when the device has finished the step.
    """
    ordered: list[Span] = []
    end = 0.0
    for span in sorted(spans, key=itemgetter(1, 3)):  # start and step
        start = max(span.start, end)
        end = max(span.end, start)
        last = ordered[-1] if ordered else None
        if last is not None and last.kind == span.kind and last.step == span.step and last.end == start:
            ordered[-1] = Span(span.kind, last.start, end, span.step, span.first_step)
        elif end > start or span.kind == "optimizer":
            is_same = span.start == start and span.end == end
            ordered.append(span if is_same else Span(span.kind, start, end, span.step, span.first_step))
    return ordered


def merge_spans(spans: Iterable[Span], num_steps: int) -> list[Span]:
    """Sum the spans of each kind over intervals of steps, which are the same on all workers."""
    intervals: dict[int, list[Span]] = {}
    for span in in_order(spans):
        intervals.setdefault(span.step // num_steps, []).append(span)
    merged = []
    for group in intervals.values():
        at = group[0].start
        by_kind: dict[str, list[Span]] = {kind: [] for kind in KINDS}
        for span in group:
            by_kind[span.kind].append(span)
        by_kind["other"] = []
        busy = sum(span.end - span.start for same in by_kind.values() for span in same)
        if (other := group[-1].end - at - busy) > 0:
            by_kind["other"] = [Span("other", 0, other, group[-1].step, group[0].first_step)]
        for kind, same in by_kind.items():
            if same:
                end = at + sum(span.end - span.start for span in same)
                merged.append(Span(kind, at, end, max(s.step for s in same), min(s.first_step for s in same)))
                at = end
    return merged


def mean_sample(samples: list[Sample]) -> Sample:
    """Their means, weighted by the time that each covers."""
    means = {}
    for name in dict.fromkeys(name for sample in samples for name in sample.values):
        known = [(sample.values[name], sample.seconds) for sample in samples if name in sample.values]
        if weight := sum(seconds for _, seconds in known):
            means[name] = round(sum(value * seconds for value, seconds in known) / weight, 1)
    return Sample(samples[-1].time if samples else 0, round(sum(sample.seconds for sample in samples), 3), means)


def timeline_files(folder: Path) -> list[Path]:
    """The workers' files in a run's folder, or in a folder given as `timeline`."""
    return sorted((folder / _FOLDER).glob(_FILES)) or sorted(folder.glob(_FILES))


def read_sessions(files: Iterable[Path]) -> list[Session]:
    """All sessions by rank and in their order, also of files that are damaged or still being written."""
    sessions = [session for path in files for session in _sessions(LineReader(path).read(), path)]
    return sorted(sessions, key=lambda session: session.rank)  # a clock may have been set back between two sessions


def condense_file(path: Path, max_bytes: int) -> None:
    """Condense a file to at most three quarters of `max_bytes`. Readers see the old file or the new one."""
    lines = path.read_bytes().splitlines(keepends=True)
    first_kept, kept_bytes = len(lines), 0
    while first_kept and kept_bytes + len(lines[first_kept - 1]) <= max_bytes // 2:
        first_kept -= 1
        kept_bytes += len(lines[first_kept])
    sessions = _sessions(parse_lines(lines[:first_kept]), path)
    factor, condensed = 1, b""
    while factor == 1 or (len(condensed) > max_bytes // 4 and factor < 1 << 40):
        condensed = b"".join(session.condense(factor * _MIN_STEPS, factor * _MIN_SAMPLE_US) for session in sessions)
        factor *= 2
    replace_file(path, condensed + b"".join(lines[first_kept:]), sync=True)


def _sessions(lines: Iterable[Any], path: Path) -> list[Session]:
    sessions: list[Session] = []
    for line in (line for line in lines if isinstance(line, dict)):
        if header := line.get("session"):
            if header.get("version") != VERSION:
                raise ValueError(
                    f"{path} has version {header.get('version')}, this paceline reads version {VERSION}: use the "
                    "paceline that recorded it"
                )
            sessions.append(Session(header))
        elif sessions:
            sessions[-1].add(line)
    return sessions
