"""A part of a metrics file as curves, for files of any length, in bounded time and memory.

A range of up to `EXACT_BYTES` is read line by line. A longer one is sampled: a few lines at each of some thousand
places of the file, and both of its ends. Curves are thinned to the minimum and the maximum of each interval of steps.

Lines are in the order of their steps, except after a resume. So if a later line has a smaller step, the lines before it
about larger steps are superseded: a sample needs no search for the lines that say so.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from paceline.observe.json_lines import TAIL_BYTES, LineReader, parse_lines, to_json
from paceline.observe.metrics import RESUMED_FROM, Curve, Steps, Values, extremes, flat_items, is_resume, is_step

EXACT_BYTES = 4 << 20
# Of a sample: places at most, and bytes.
MAX_PLACES = 2000
SAMPLE_BYTES = 3 << 20
LINES_PER_PLACE = 3
# Further names are left out: no run logs so many.
MAX_NAMES = 5000


# An offset, and what the lines after it contain.
_Place: TypeAlias = tuple[int, list[Any]]


class Series(NamedTuple):
    name: str
    steps: Steps
    values: Values
    is_thinned: bool


@dataclass
class Window:
    """first_step, last_step: of the whole file; 0 if it has none. offset: the end of its last complete line.

    is_sampled: not every line in the range was read. names: all names that were seen, also of metrics that were not
    asked for.
    """

    first_step: int = 0
    last_step: int = 0
    offset: int = 0
    is_sampled: bool = False
    names: list[str] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)


def read_window(
    path: Path,
    names: Iterable[str] | None = None,
    first: int = 0,
    last: float = math.inf,
    *,
    points: int = 2000,
    exact: bool = False,
) -> Window:
    """The curves of `names` (metrics, or groups such as "waiting"; None for all) between two steps, both included.

    points: about this many per curve. exact: read every line of the range, however long that takes.
    """
    columns = _Columns(names)
    with path.open("rb") as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        head, (tail, end) = _parse(_lines_at(descriptor, 0, min(size, TAIL_BYTES))), _tail(descriptor, size)
        start, stop, limit = 0, size, math.inf
        if size > EXACT_BYTES:
            line_bytes = max(len(to_json(record)) for record in [*head, *tail, {}]) + 1
            places = list(_sample(descriptor, 0, size, line_bytes))
            start, stop, limit = _bytes_of(places, first, last, size, line_bytes)
        is_sampled = stop - start > EXACT_BYTES and not exact
        if not is_sampled:
            _read_exact(path, start, stop, limit, columns, first, last)
        else:
            if (start, stop) != (0, size):
                places = list(_sample(descriptor, start, stop, line_bytes))
            records = [record for _, block in places for record in block]
            records = [*(head if start == 0 else ()), *records, *(tail if stop == size else ())]
            columns.add(_not_superseded(records, limit), first, last)
    columns.note_names([*head, *tail])
    return Window(
        first_step=min((record["step"] for record in head if "step" in record), default=0),
        last_step=max((record["step"] for record in _not_superseded(tail, math.inf)), default=0),
        offset=end,
        is_sampled=is_sampled,
        names=columns.names(),
        series=columns.series(points),
    )


def _read_exact(path: Path, start: int, stop: int, limit: float, columns: _Columns, first: int, last: float) -> None:
    """limit: the last step that counts, by what follows the range."""

    def reader() -> LineReader:
        return LineReader(path, start=start, stop=stop)

    resumes = [r[RESUMED_FROM] for b in reader().blocks(f'"{RESUMED_FROM}"'.encode()) for r in b if is_resume(r)]
    limits = list(accumulate([limit, *reversed(resumes)], min))[::-1]
    segment = 0
    for block in reader().blocks(b"" if resumes else columns.common_key):
        kept = []
        for record in block:
            if is_resume(record):
                segment = min(segment + 1, len(limits) - 1)
            elif is_step(record) and record["step"] <= limits[segment]:
                kept.append(record)
        columns.add(kept, first, last)


def _bytes_of(places: Sequence[_Place], first: int, last: float, size: int, line_bytes: int) -> tuple[int, int, float]:
    """The bytes that contain all lines about these steps, and the last step in them that counts."""
    known = [(offset, _step(record)) for offset, block in places for record in block[:1]]
    start, stop = 0, size
    bound = limit = math.inf  # bound: the smallest step so far, from the end
    for offset, step in reversed(known):
        if step > bound:
            continue  # superseded
        if step > last:
            stop, limit = min(offset + line_bytes, size), step  # a line in the range may end here
        bound = step
        if step < first:
            start = offset
            break
    return start, stop, limit


def _sample(descriptor: int, start: int, stop: int, line_bytes: int) -> Iterator[_Place]:
    """line_bytes: the length of a long line."""
    block_bytes = LINES_PER_PLACE * line_bytes
    count = max(min(MAX_PLACES, SAMPLE_BYTES // block_bytes), 64)
    stride = max((stop - start) // count, 1)
    for offset in range(start, stop, stride):
        yield offset, _parse(_lines_at(descriptor, offset, min(block_bytes, stop - offset)))


def _lines_at(descriptor: int, offset: int, num_bytes: int) -> list[bytes]:
    """The complete lines in these bytes."""
    block = os.pread(descriptor, num_bytes, offset)
    begin = block.find(b"\n") + 1 if offset else 0
    return block[begin : block.rfind(b"\n")].split(b"\n") if block.rfind(b"\n") > begin else []


def _parse(lines: Sequence[bytes]) -> list[Any]:
    return [record for record in parse_lines(lines) if is_step(record) or is_resume(record)]


def _step(record: dict[str, Any]) -> int:
    return int(record["step"] if "step" in record else record[RESUMED_FROM])


def _not_superseded(records: Sequence[dict[str, Any]], limit: float) -> list[dict[str, Any]]:
    """Records about steps that no later record falls behind."""
    limits = list(accumulate([limit, *(_step(record) for record in reversed(records))], min))[-2::-1]
    return [record for record, last in zip(records, limits, strict=True) if "step" in record and record["step"] <= last]


def _tail(descriptor: int, size: int) -> tuple[list[Any], int]:
    """The last lines of the file, and where the last complete one ends."""
    start = max(0, size - TAIL_BYTES)
    block = os.pread(descriptor, size - start, start)
    return _parse(_lines_at(descriptor, start, len(block))), start + block.rfind(b"\n") + 1


class _Columns:
    """Collects the wanted numbers, by name."""

    def __init__(self, names: Iterable[str] | None) -> None:
        self._wanted = None if names is None else frozenset(names)
        self._groups = tuple(f"{name}/" for name in self._wanted or ())
        # Keys of a line that lead to a wanted metric: "a" and "a/b" for "a/b".
        self._keys = {"/".join(parts[: i + 1]) for parts in map(_parts, self._wanted or ()) for i in range(len(parts))}
        self._seen_keys: set[str] = set()
        self._names: dict[str, None] = {}
        self._curves: dict[str, Curve] = {}
        self._counts: dict[str, int] = {}

    @property
    def common_key(self) -> bytes:
        """Bytes that every line with a wanted metric contains."""
        tops = {_parts(name)[0] for name in self._wanted or ()}
        top = tops.pop() if len(tops) == 1 else ""
        return f'"{top}'.encode() if re.fullmatch(r"\w+", top, re.ASCII) else b""  # others may be escaped

    def add(self, records: Sequence[dict[str, Any]], first: int, last: float) -> None:
        columns: dict[str, tuple[list[int], list[float]]] = {}
        for record in records:
            step = record["step"]
            if not self._seen_keys.issuperset(record):
                self.note_names([record])
            if not first <= step <= last:
                continue
            chosen = {key: v for key, v in record.items() if self._wanted is None or self._leads_to_wanted(key)}
            chosen.pop("step", None)
            for name, number in flat_items(chosen):
                if self._is_wanted(name) and (name in columns or len(columns) < MAX_NAMES):
                    steps, numbers = columns.setdefault(name, ([], []))
                    steps.append(step)
                    numbers.append(number)
        for name, column in columns.items():
            if name in self._curves or len(self._curves) < MAX_NAMES:
                self._curves.setdefault(name, Curve()).add(*column)
                self._counts[name] = self._counts.get(name, 0) + len(column[0])

    def note_names(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            for name, _ in flat_items(record):
                if len(self._names) < MAX_NAMES and name != "step":
                    self._names[name] = None
            self._seen_keys.update(record)

    def names(self) -> list[str]:
        return list(self._names)

    def series(self, points: int) -> list[Series]:
        found = []
        for name, curve in self._curves.items():
            steps, values = curve.points
            is_thinned = len(steps) < self._counts[name] and len(steps) >= points
            if len(steps) > points:
                kept = extremes(steps, values, points)
                steps, values, is_thinned = steps[kept], values[kept], True
            found.append(Series(name, steps, values, is_thinned))
        return found

    def _leads_to_wanted(self, key: str) -> bool:
        return key in self._keys or key.startswith(self._groups)

    def _is_wanted(self, name: str) -> bool:
        return self._wanted is None or name in self._wanted or name.startswith(self._groups)


def _parts(name: str) -> list[str]:
    return name.split("/")
