"""The files of a timeline: `rank-0.jsonl` and so on, one per worker; see paceline.observe.json_lines.

A session is one process's part of a run. Times are whole microseconds since the session began. A line is one of
    {"session": {...}}         a worker starts: its rank, host and device, and the Unix time of its microsecond 0
    {"steps": [...], "spans": [...], "events": [...], "samples": [...]}      the last second or so
    {"stretches": [...], "events": [...], "samples": [...]}                  older parts, condensed
    {"end": microseconds}      the session ended, normally or by an error
where
    a step is       [step, start, then the time from each of its moments to the next]
    a span is       [kind, step, start, duration]
    an event is     [name, step, time, details]
    a sample is     [time, seconds it covers, then a value or null for each of SAMPLED]
    a stretch is    [first step, last step, number of steps, start, end, then the microseconds in each of KINDS]

Condensing keeps a file small. The newer half is left alone. Older steps become stretches of 16, 32, 64 or more steps,
and older samples means over longer times, until they fit into a quarter of the file. All sums are preserved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.observe.json_lines import LineReader, parse_lines, replace_file, to_json

VERSION = 1
# The activities of a worker. "writing": a checkpoint being written to disk in the background.
KINDS = ("compute", "data", "sync", "optimizer", "checkpoint", "evaluation", "writing")
# Sampled every second. CPU in percent of one core, host CPU in percent of all cores; memory in bytes.
SAMPLED = ("cpu", "memory", "host_cpu", "host_memory", "gpu", "gpu_memory")
MAX_EVENTS = 5000

_FOLDER, _FILES = "timeline", "rank-*.jsonl"
_BEFORE, _PASS, _AFTER = ("data", ""), ("data", "compute", ""), ("sync", "optimizer", "sync")
_MOMENTS_WITHOUT_PASSES = len(_BEFORE) + len(_AFTER) + 1
_MIN_STEPS_PER_STRETCH = 16
_MIN_SAMPLE_S = 8.0
_ROWS_PER_LINE = 500

Row = list[Any]


def kinds_between(num_moments: int) -> tuple[str, ...]:
    """The activity between each two moments of a step; "" for time that belongs to no kind.

    The moments: the step begins; its plan is there; for each pass over micro-batches: it begins, its data is there, its
    backward is done; then the exchange begins, its result is there, the optimizer is done, the replicas are averaged.
    """
    num_passes, rest = divmod(num_moments - _MOMENTS_WITHOUT_PASSES, len(_PASS))
    if num_passes < 0 or rest:
        raise ValueError(f"a step has {_MOMENTS_WITHOUT_PASSES} moments and {len(_PASS)} per pass, not {num_moments}")
    return _BEFORE + num_passes * _PASS + _AFTER


def parts_of(step: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """Kind, start and end of each part of a recorded step, in order."""
    start, *durations = step[1:]
    for kind, duration in zip(kinds_between(len(durations) + 1), durations, strict=True):
        if kind:
            yield kind, start, start + duration
        start += duration


@dataclass
class Session:
    """One process's part of a run, as recorded. end: None unless the process recorded its end."""

    header: dict[str, Any]
    steps: list[Row] = field(default_factory=list)
    spans: list[Row] = field(default_factory=list)
    stretches: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    end: int | None = None

    def __post_init__(self) -> None:
        self.rank, self.size = int(self.header["rank"]), int(self.header["size"])
        self.host, self.device = str(self.header["host"]), str(self.header["device"])
        self.unix_time = float(self.header["unix_time"])

    def add(self, line: dict[str, Any]) -> None:
        if isinstance(line.get("end"), int):
            self.end = line["end"]
        for name, is_valid in _ROW_CHECKS.items():
            rows = line.get(name)
            if isinstance(rows, list):
                getattr(self, name).extend(row for row in rows if isinstance(row, list) and is_valid(row))

    @property
    def last_time(self) -> int:
        """The end, or the time of the last record."""
        times = [self.end or 0, *(row[4] for row in self.stretches[-1:]), *(sum(row[1:]) for row in self.steps[-1:])]
        times += [row[0] for row in self.samples[-1:]] + [row[2] for row in self.events[-1:]]
        times += [row[2] + row[3] for row in self.spans[-1:]]
        return int(max(times))

    def condensed(self, steps_per_stretch: int, sample_s: float) -> bytes:
        """The session's lines, with steps and spans as stretches."""
        parts = {
            "stretches": merge_stretches(self._as_stretches(), steps_per_stretch),
            "samples": _merge_samples(self.samples, sample_s),
            "events": self.events[-MAX_EVENTS:],
        }
        lines: list[dict[str, Any]] = [{"session": self.header}]
        for name, rows in parts.items():
            lines += [{name: rows[i : i + _ROWS_PER_LINE]} for i in range(0, len(rows), _ROWS_PER_LINE)]
        lines += [] if self.end is None else [{"end": self.end}]
        return "".join(f"{to_json(line)}\n" for line in lines).encode()

    def _as_stretches(self) -> list[Row]:
        rows = list(self.stretches)
        for step in self.steps:
            times = dict.fromkeys(KINDS, 0)
            for kind, start, end in parts_of(step):
                times[kind] += end - start
            rows.append([step[0], step[0], 1, step[1], sum(step[1:]), *times.values()])
        for kind, number, start, duration in self.spans:
            # Background writing overlaps with later steps, which have stretches of their own.
            end = start if kind == "writing" else start + duration
            rows.append([number, number, 0, start, end, *(duration * (kind == each) for each in KINDS)])
        return sorted(rows, key=lambda row: row[3])


def timeline_files(folder: Path) -> list[Path]:
    """The workers' files in a run's folder, or in a folder given as `timeline`."""
    return sorted((folder / _FOLDER).glob(_FILES)) or sorted(folder.glob(_FILES))


def read_sessions(files: Iterable[Path]) -> list[Session]:
    """All sessions by rank and time, also of files that are damaged or still being written."""
    sessions = [session for path in files for session in _sessions(LineReader(path).read(), path)]
    return sorted(sessions, key=lambda session: (session.rank, session.unix_time))


def condense_file(path: Path, max_bytes: int) -> None:
    """Condense a file to at most three quarters of `max_bytes`. Readers see the old file or the new one."""
    lines = path.read_bytes().splitlines(keepends=True)
    first_kept, kept_bytes = len(lines), 0
    while first_kept and kept_bytes + len(lines[first_kept - 1]) <= max_bytes // 2:
        first_kept -= 1
        kept_bytes += len(lines[first_kept])
    old = [line for line in parse_lines(b"".join(lines[:first_kept])) if isinstance(line, dict)]
    sessions = _sessions(old, path)
    num_steps, sample_s = _MIN_STEPS_PER_STRETCH, _MIN_SAMPLE_S
    while True:
        condensed = b"".join(session.condensed(num_steps, sample_s) for session in sessions)
        if len(condensed) <= max_bytes // 4 or num_steps > 1 << 40:
            break
        num_steps, sample_s = 2 * num_steps, 2 * sample_s
    replace_file(path, condensed + b"".join(lines[first_kept:]), sync=True)


def merge_stretches(rows: Iterable[Row], steps_per_stretch: int) -> list[Row]:
    """Sum stretches that begin in the same interval of steps. The intervals are the same on all workers."""
    merged = []
    for _, group in groupby(rows, key=lambda row: row[0] // steps_per_stretch):
        first, last, count, start, end, *times = zip(*group, strict=True)
        merged.append([min(first), max(last), sum(count), min(start), max(end), *map(sum, times)])
    return merged


def _merge_samples(rows: Iterable[Row], seconds: float) -> list[Row]:
    """Means over about this many seconds, weighted by the time that each sample covers."""
    merged = []
    for _, group in groupby(rows, key=lambda row: row[0] // int(seconds * 1e6)):
        samples = list(group)
        means: Row = []
        for i in range(2, 2 + len(SAMPLED)):
            known = [(row[i], row[1]) for row in samples if row[i] is not None]
            weight = sum(part for _, part in known)
            means.append(round(sum(value * part for value, part in known) / weight, 1) if weight else None)
        merged.append([samples[-1][0], round(sum(row[1] for row in samples), 3), *means])
    return merged


def _sessions(lines: Iterable[dict[str, Any]], path: Path) -> list[Session]:
    sessions: list[Session] = []
    for line in lines:
        if "session" in line:
            sessions.append(_session(line["session"], path))
        elif sessions:
            sessions[-1].add(line)
    return sessions


def _session(header: Any, path: Path) -> Session:
    try:
        if header["version"] != VERSION:
            raise ValueError(
                f"{path} has version {header['version']}, this paceline reads version {VERSION}: use the paceline "
                "that recorded it"
            )
        return Session(header)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a timeline: its first line has no valid session") from error


def _are_ints(values: Sequence[Any]) -> bool:
    return all(type(value) is int for value in values)


# Rows that a damaged file may contain are skipped.
_ROW_CHECKS: dict[str, Callable[[Row], bool]] = {
    "steps": lambda row: len(row) >= 7 and (len(row) - 7) % len(_PASS) == 0 and _are_ints(row),
    "spans": lambda row: len(row) == 4 and row[0] in KINDS and _are_ints(row[1:]),
    "stretches": lambda row: len(row) == 5 + len(KINDS) and _are_ints(row),
    "events": lambda row: (
        len(row) == 4 and isinstance(row[0], str) and _are_ints(row[1:3]) and isinstance(row[3], dict)
    ),
    "samples": lambda row: (
        len(row) == 2 + len(SAMPLED) and all(value is None or isinstance(value, int | float) for value in row)
    ),
}
