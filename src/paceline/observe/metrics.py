"""A run's metrics: `metrics.jsonl` has one JSON line per logged step.

    {"step": 40, "time": 12.5, "epoch": 0, "loss": 2.31, "lr": 0.001, "grad_norm": 0.8, "samples_per_s": 812.0,
     "samples": 2560, "tokens_per_s": 52100.0, "shares": [6, 2], "waiting": [0.01, 0.04],
     "lanes": {"computing": [0.9, 0.85], "data": [0.02, 0.01], "exchange": [0.05, 0.05], "rest": [0.02, 0.05]},
     "speeds": [30.1, 10.2], "efficiency": 0.93, "eval": {"loss": 2.4}}

`step` counts completed steps, `samples` the samples in them. `time` is seconds of training, without the time between a
stop and a resume. `shares` (micro-batches) and `waiting` (fraction of the time, 0 to 1) have one number per worker, and
so have the other fractions in `lanes` (see `paceline.observe.rates.Rates`) and `speeds` (micro-batches per second while
computing). All refer to the time since the previous line; they come from numbers that workers exchange in every step.
`efficiency`: the run's speed over the sum of the workers'. Several lines may describe one step: the newest number of
each name counts. `{"resumed_from": 30}` means that the run was resumed from step 30: earlier lines about later steps
are superseded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, groupby
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.json_lines import (
    LineReader,
    LineWriter,
    first_line,
    is_count,
    is_number,
    lines_from_end,
    parse_lines,
)

RESUMED_FROM = "resumed_from"
SAMPLES = "samples"
# A curve with more points is thinned while it is read.
MAX_POINTS = 16_384
_BUFFER_POINTS = 4 * MAX_POINTS
# Further names are left out: no run logs so many.
MAX_NAMES = 5000
WORKER_RATE = "samples_per_s@"

Steps = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]
Columns = dict[str, tuple[list[int], list[float]]]


class MetricsWriter:
    """Appends metrics to a file; a `Logger`. For rank 0.

    start_step: completed steps when the run starts or is resumed. Existing lines about later steps are superseded, and
    `time` and `samples` continue from the newest remaining line.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        self._lines = LineWriter(path)
        try:
            if path.stat().st_size:
                self._lines.write({RESUMED_FROM: start_step})
            self._start = monotonic() - _newest(path, "time")
            self._num_samples = int(_newest(path, SAMPLES))
        except OSError:
            self._lines.close()
            raise

    def log(self, step: int, values: Mapping[str, Any], num_samples: int = 0) -> None:
        """Write one line. Values are numbers, lists of one number per worker, or mappings, `{"eval": {"loss": 2}}`.

        num_samples: trained since the last line with samples; the line has their sum since the start of the run.
        """
        line = {"step": step, "time": round(monotonic() - self._start, 3), **values}
        if num_samples:
            self._num_samples += num_samples
            line[SAMPLES] = self._num_samples
        self._lines.write(line | {"step": int(step)})

    def close(self) -> None:
        self._lines.close()


def _newest(path: Path, name: str) -> float:
    """The newest number of this name that counts; 0 without one. A run continues at once, however long its file is."""
    limit = math.inf
    for record in lines_from_end(path, (f'"{name}"'.encode(), f'"{RESUMED_FROM}"'.encode())):
        if is_resume(record):
            limit = min(limit, record[RESUMED_FROM])
        elif is_step(record) and record["step"] <= limit and is_number(value := record.get(name)):
            return float(value)
    return 0.0


class Curve:
    """The numbers of one name, by step. The newest number of a step counts.

    is_whole: keep all points. Otherwise a curve of more than `MAX_POINTS` points keeps the minimum and the maximum of
    each interval of steps: the extremes and their steps are exact, and a plot looks the same.
    """

    def __init__(self, *, is_whole: bool = False) -> None:
        self._is_whole = is_whole
        self._steps = np.empty(0, np.int64)
        self._values = np.empty(0)
        self._added: list[tuple[Steps, Values]] = []
        self._num_finite = 0
        self._mean = 0.0
        self.is_thinned = False

    def add(self, steps: Sequence[int] | Steps, values: Sequence[float] | Values) -> None:
        added = np.array(steps, np.int64), np.array(values, np.float64)
        self._added.append(added)
        finite = added[1][np.isfinite(added[1])]
        if len(finite):
            total = self._num_finite + len(finite)
            # Divide before adding: a sum of numbers near 1e308 overflows.
            self._mean = self._mean * (self._num_finite / total) + float(np.sum(finite / total))
            self._num_finite = total
        if not self._is_whole and sum(len(new) for new, _ in self._added) > _BUFFER_POINTS:
            self._merge_added()

    @property
    def points(self) -> tuple[Steps, Values]:
        """In the order of the steps."""
        self._merge_added()
        return self._steps, self._values

    def drop_after(self, step: int) -> None:
        """Forget the points of later steps, which a resumed run supersedes. `mean` still counts them."""
        steps, values = self.points
        count = int(np.searchsorted(steps, step, side="right"))
        self._steps, self._values = steps[:count], values[:count]

    @property
    def mean(self) -> float | None:
        """Of all finite values, including those that were thinned out; None without one."""
        return self._mean if self._num_finite else None

    def thin(self, max_points: int) -> None:
        self._merge_added()
        if len(self._steps) > max_points:
            kept = extremes(self._steps, self._values, max_points)
            self._steps, self._values, self.is_thinned = self._steps[kept], self._values[kept], True

    def _merge_added(self) -> None:
        if not self._added:
            return
        steps = np.concatenate([self._steps, *(steps for steps, _ in self._added)])
        values = np.concatenate([self._values, *(values for _, values in self._added)])
        self._added = []
        self._steps, newest = np.unique(steps[::-1], return_index=True)
        self._values = values[::-1][newest]
        if not self._is_whole:
            self.thin(MAX_POINTS)


class Curves:
    """The metrics of a file.

    wanted: the metrics, or groups such as "waiting", whose numbers are kept; None for all. WORKER_RATE is the group of
    the workers' samples per second. is_whole: see `Curve`.
    num_lines: lines about steps that count. num_unreadable: skipped lines. last_step: 0 if there is none. shares,
    waiting: one number per worker, from the last line that has them. resumed_from: the steps of all resumes.
    """

    def __init__(self, wanted: Iterable[str] | None = None, *, is_whole: bool = False) -> None:
        self._wanted = None if wanted is None else frozenset(wanted)
        self._groups = tuple(name if name == WORKER_RATE else f"{name}/" for name in self._wanted or ())
        # Keys of a line that lead to a wanted metric: "a" and "a/b" for "a/b".
        parts = [name.split("/") for name in self._wanted or ()]
        self._keys = {"/".join(each[: i + 1]) for each in parts for i in range(len(each))}
        self._is_whole = is_whole
        self.last_step = self.num_lines = self.num_unreadable = 0
        self.shares: list[float] = []
        self.waiting: list[float] = []
        self.resumed_from: list[int] = []
        self._names: dict[str, None] = {}
        self._seen_keys: set[str] = set()
        self.curves: dict[str, Curve] = {}

    def names(self) -> list[str]:
        """The names with a number except `step`, by first appearance: "loss", "eval/loss", "shares/0"."""
        return list(self._names)

    def series(self, name: str) -> tuple[Steps, Values]:
        """The steps with a number of this name, and the numbers. "samples_per_s@1": worker 1's throughput."""
        return self.curves.get(name, Curve()).points

    def mean(self, name: str) -> float | None:
        return self.curves.get(name, Curve()).mean

    def last(self, name: str) -> float | None:
        """The number of the last step that has one."""
        values = self.series(name)[1]
        return float(values[-1]) if len(values) else None

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Add lines, each with a valid step."""
        self.note_names(record for record in records if not self._seen_keys.issuperset(record))
        self.last_step = max([self.last_step, *(record["step"] for record in records)])
        self.num_lines += len(records)
        self.shares = _newest_numbers(records, "shares", self.shares)
        self.waiting = _newest_numbers(records, "waiting", self.waiting)
        has_rates = self._wanted is None or WORKER_RATE in self._wanted
        lines = [record | _worker_rates(record) for record in records] if has_rates else records
        if self._wanted is not None:
            kept = {"step", *filter(self._leads_to_wanted, set[str]().union(*lines))}
            lines = [{key: line[key] for key in line if key in kept} for line in lines]
        for name, column in columns_of(lines).items():
            if self.wants(name) and (name in self.curves or len(self.curves) < MAX_NAMES):
                self.curves.setdefault(name, Curve(is_whole=self._is_whole)).add(*column)
                if not name.startswith(WORKER_RATE):
                    self._names[name] = None

    def note_names(self, records: Iterable[dict[str, Any]]) -> None:
        """Record the names in these lines, also of metrics that are not wanted."""
        for record in records:
            for name, _ in flat_items(record):
                if len(self._names) < MAX_NAMES and name != "step":
                    self._names[name] = None
            self._seen_keys.update(record)

    def _leads_to_wanted(self, key: str) -> bool:
        return key in self._keys or key.startswith(self._groups)

    def wants(self, name: str) -> bool:
        return self._wanted is None or name in self._wanted or name.startswith(self._groups)


def _newest_numbers(records: Sequence[Mapping[str, Any]], name: str, known: list[float]) -> list[float]:
    """The last list of numbers of this name; `known` without one."""
    lists: Iterator[Any] = (record.get(name) for record in reversed(records))
    return next(filter(_are_numbers, lists), known)


def _worker_rates(record: Mapping[str, Any]) -> dict[str, float]:
    """The throughput of each of several workers."""
    shares: Any = record.get("shares")
    rate: Any = record.get("samples_per_s")
    if not _are_numbers(shares) or len(shares) == 1 or not is_number(rate) or not (total := sum(shares)) > 0:
        return {}
    return {f"{WORKER_RATE}{rank}": rate * share / total for rank, share in enumerate(shares)}


class CountedLines:
    """Lines of a file about steps that no later resume supersedes.

    tail: read only the end of the file. start, stop: read only these bytes. limit: the last step that lines after
    `stop` do not supersede. resumed_from: the steps of all resumes.
    """

    def __init__(
        self, path: Path, *, tail: bool = False, start: int = 0, stop: int | None = None, limit: float = math.inf
    ) -> None:
        stop = path.stat().st_size if stop is None else stop  # a resume that is written meanwhile is not seen once
        self._reader = LineReader(path, tail=tail, start=start, stop=stop)
        resumes = LineReader(path, start=self._reader.offset, stop=stop)
        found = resumes.blocks(containing=f'"{RESUMED_FROM}"'.encode())
        self.resumed_from = [record[RESUMED_FROM] for block in found for record in block if is_resume(record)]
        # The last step that counts, for the lines before each resume, and for those after the last one.
        self._limits = list(accumulate([limit, *reversed(self.resumed_from)], min))[::-1]
        self.num_unreadable = 0

    def blocks(self, containing: bytes = b"") -> Iterator[list[dict[str, Any]]]:
        """About a megabyte at a time. containing: lines without these bytes may be skipped."""
        segment = 0
        for block in self._reader.blocks(b"" if self.resumed_from else containing):
            counted = []
            for record in block:
                if is_resume(record):
                    segment = min(segment + 1, len(self._limits) - 1)
                elif not is_step(record):
                    self.num_unreadable += 1
                elif record["step"] <= self._limits[segment]:
                    counted.append(record)
            yield counted
        self.num_unreadable += self._reader.num_unreadable


def read_curves(
    path: Path, wanted: Iterable[str] | None = None, *, is_whole: bool = False, tail: bool = False
) -> Curves:
    """A file's metrics, without superseded lines, in memory that does not depend on the file's length.

    wanted: the metrics and groups of metrics to keep; None for all. is_whole: keep all points (16 bytes each). tail:
    read only the end of the file.
    """
    lines, curves = CountedLines(path, tail=tail), Curves(wanted, is_whole=is_whole)
    for block in lines.blocks():
        curves.add(block)
    curves.resumed_from, curves.num_unreadable = lines.resumed_from, lines.num_unreadable
    return curves


def mean_samples_per_s(path: Path, curves: Curves) -> float | None:
    """The mean over the run, without the first step, which takes longer than others; None if unknown.

    curves: with `time` and `samples`, of the whole file or its end. A run that did not log its samples is read again.
    """
    first = first_line(path)
    steps, samples = curves.series(SAMPLES)
    times = curves.series("time")
    is_known = len(steps) and len(times[0])
    if is_known and isinstance(first, dict) and is_count(first.get(SAMPLES)) and is_number(first.get("time")):
        # The line may be missing in a thinned curve.
        seconds, count = np.interp(steps[-1], *times) - first["time"], float(samples[-1]) - first[SAMPLES]
        if seconds > 0 and count > 0:
            return float(count / seconds)
    return read_curves(path, ("samples_per_s",)).mean("samples_per_s")


def flat_items(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """All numbers by flat name: "loss", "eval/loss", "shares/0". Scalars of torch and NumPy are numbers."""
    for name, value in values.items():
        if is_number(value):
            yield prefix + name, value
        elif isinstance(value, list | tuple):
            yield from flat_items({str(i): item for i, item in enumerate(value)}, f"{prefix}{name}/")
        elif isinstance(value, Mapping):
            yield from flat_items(value, f"{prefix}{name}/")
        elif value is not None:
            with suppress(AttributeError, ValueError, RuntimeError):  # not a scalar
                if is_number(number := value.item()):
                    yield prefix + name, number


def columns_of(records: Sequence[dict[str, Any]]) -> Columns:
    """The numbers of these lines by flat name (see `flat_items`), with their steps.

    Neighbouring lines with the same keys are turned into columns together, which is several times faster.
    """
    columns: Columns = {}
    for _, group in groupby(records, tuple):
        alike = list(group)
        steps = [record["step"] for record in alike]
        for name in alike[0]:
            if name != "step":
                _add_column(columns, name, steps, [record[name] for record in alike])
    return columns


def _add_column(columns: Columns, name: str, steps: list[int], values: list[Any]) -> None:
    kinds = set(map(type, values))
    if kinds == {float} or (kinds == {int} and max(map(abs, values)) < 1 << 63):
        known = columns.setdefault(name, ([], []))
        known[0].extend(steps)
        known[1].extend(values)
    elif kinds == {list} and len(set(map(len, values))) == 1:
        for i, column in enumerate(zip(*values, strict=True)):
            _add_column(columns, f"{name}/{i}", steps, list(column))
    elif kinds == {dict} and len(set(map(tuple, values))) == 1:
        for key in values[0]:
            _add_column(columns, f"{name}/{key}", steps, [value[key] for value in values])
    else:
        for step, value in zip(steps, values, strict=True):
            for flat, number in flat_items({name: value}):
                known = columns.setdefault(flat, ([], []))
                known[0].append(step)
                known[1].append(number)


def parse_records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The lines about steps, and the resumes."""
    return [record for record in parse_lines(lines) if is_step(record) or is_resume(record)]


def is_step(record: Any) -> bool:
    """Whether a line is about a step."""
    return isinstance(record, dict) and is_count(record.get("step"))


def is_resume(record: Any) -> bool:
    return isinstance(record, dict) and "step" not in record and is_count(record.get(RESUMED_FROM))


def step_of(record: Mapping[str, Any]) -> int:
    """Of a line about a step, or of a resume."""
    return int(record["step"] if "step" in record else record[RESUMED_FROM])


def not_superseded(records: Sequence[dict[str, Any]], limit: float = math.inf) -> list[dict[str, Any]]:
    """Lines about steps up to `limit`, without those that a later line or resume supersedes."""
    limits = list(accumulate([limit, *map(step_of, reversed(records))], min))[-2::-1]
    return [record for record, last in zip(records, limits, strict=True) if is_step(record) and record["step"] <= last]


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_number, value))


def extremes(steps: Steps, values: Values, max_points: int) -> npt.NDArray[np.intp]:
    """The indices of the minimum and the maximum in each of max_points / 2 - 1 equal intervals of steps."""
    span = float(steps[-1]) - float(steps[0]) + 1.0
    interval = ((steps - steps[0]) / span * (max_points // 2 - 1)).astype(np.int64)
    starts = np.flatnonzero(np.diff(interval, prepend=-1))
    kept = [np.array([0, len(steps) - 1], np.intp)]
    for sign in (1.0, -1.0):
        ranked = np.where(np.isfinite(values), sign * values, np.inf)
        kept.append(np.lexsort((ranked, interval))[starts])
    return np.unique(np.concatenate(kept))
