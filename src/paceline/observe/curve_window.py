"""A part of a metrics file as curves, for files of any length, in bounded time and memory.

A range of up to `EXACT_BYTES` is read line by line. A longer one is sampled: a few lines at some thousand offsets of
the file, and at both ends. Curves are thinned to the minimum and the maximum of each interval of steps.

Lines are in the order of their steps, except after a resume, which supersedes lines about later steps. So a resume is
searched for only between two offsets whose steps are not in order.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from paceline.observe.json_lines import TAIL_BYTES
from paceline.observe.metrics import (
    RESUMED_FROM,
    CountedLines,
    Curve,
    Curves,
    Steps,
    Values,
    is_step,
    not_superseded,
    parse_records,
    step_of,
)

EXACT_BYTES = 4 << 20
# Limits of a sample.
MAX_PLACES = 2000
SAMPLE_BYTES = 3 << 20
LINES_PER_PLACE = 3
MAX_RESUMES = 100

# An offset, and what the lines after it contain.
_Place: TypeAlias = tuple[int, list[Any]]


class _Part(NamedTuple):
    """A range of bytes. limit: the last step in it that later lines do not supersede."""

    start: int
    stop: int
    limit: float


class Series(NamedTuple):
    name: str
    steps: Steps
    values: Values
    is_thinned: bool


@dataclass
class Window:
    """first_step, last_step: of the whole file; 0 if it has none. offset: the end of its last complete line.

    is_sampled: not every line in the range was read. names: all names that were seen, also of metrics that were not
    requested.
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

    points: about this many per curve. exact: read every line of the range, without a time limit.
    """
    names = None if names is None else list(names)
    curves = Curves(names)

    def add(records: list[dict[str, Any]]) -> None:
        curves.add([record for record in records if first <= record["step"] <= last])

    with path.open("rb") as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        tail_start = max(0, size - TAIL_BYTES)
        last_newline = os.pread(descriptor, size - tail_start, tail_start).rfind(b"\n")
        ends = [_lines_at(descriptor, 0, TAIL_BYTES), _lines_at(descriptor, tail_start, TAIL_BYTES)]
        head, tail = map(parse_records, ends)
        line_bytes = max(map(len, [*ends[0], *ends[1], b""])) + 1
        part, places = _Part(0, size, math.inf), []
        while part.stop - part.start > EXACT_BYTES:
            places = _with_resumes(path, list(_sample(descriptor, part, line_bytes)), line_bytes)
            narrower = _narrowed(part, places, first, last, line_bytes)
            if narrower.stop - narrower.start > (part.stop - part.start) / 2:
                break
            part = narrower
        is_sampled = part.stop - part.start > EXACT_BYTES and not exact
        if not is_sampled:
            counted = CountedLines(path, start=part.start, stop=part.stop, limit=part.limit)
            for block in counted.blocks(_common_key(names or ())):
                add(block)
        else:
            records = [record for _, block in places for record in block]
            records = [*(head if part.start == 0 else ()), *records, *(tail if part.stop == size else ())]
            add(not_superseded(records, part.limit))
    curves.note_names(record for record in (*head, *tail) if is_step(record))
    names = curves.names()
    return Window(
        first_step=min((record["step"] for record in head if "step" in record), default=0),
        last_step=step_of(tail[-1]) if tail else 0,
        offset=tail_start + last_newline + 1,
        is_sampled=is_sampled,
        names=names,
        series=[_series(name, curve, points) for name, curve in curves.curves.items() if name in set(names)],
    )


def _series(name: str, curve: Curve, points: int) -> Series:
    curve.thin(points)
    return Series(name, *curve.points, curve.is_thinned)


def _common_key(names: Sequence[str]) -> bytes:
    """Bytes that every line with one of these metrics contains."""
    tops = {name.split("/")[0] for name in names}
    top = tops.pop() if len(tops) == 1 else ""
    return f'"{top}'.encode() if re.fullmatch(r"\w+", top, re.ASCII) else b""  # others may be escaped


def _narrowed(part: _Part, places: Sequence[_Place], first: int, last: float, line_bytes: int) -> _Part:
    """The range within `part` that contains all lines about these steps."""
    start, stop, limit = part
    bound, end = limit, stop  # the smallest step so far, from the end, and where its line may end
    for offset, block in reversed(places):
        if not block or (step := step_of(block[0])) > bound:
            continue  # superseded
        if step > last and is_step(block[0]):  # a resume may be anywhere after its offset
            stop, limit = end, bound  # up to the next place: a resume before it may have no place between them
        bound, end = step, min(offset + 2 * line_bytes, part.stop)
        if step < first:
            start = offset
            break
    return _Part(start, stop, limit)


def _sample(descriptor: int, part: _Part, line_bytes: int) -> Iterator[_Place]:
    """line_bytes: the length of a long line."""
    block_bytes = LINES_PER_PLACE * line_bytes
    count = max(min(MAX_PLACES, SAMPLE_BYTES // block_bytes), 64)
    stride = max((part.stop - part.start) // count, 1)
    for offset in range(part.start, part.stop, stride):
        yield offset, parse_records(_lines_at(descriptor, offset, min(block_bytes, part.stop - offset)))


def _with_resumes(path: Path, places: list[_Place], line_bytes: int) -> list[_Place]:
    """The places, with resumes added between places whose steps are not in order."""
    found: list[_Place] = []
    num_searched = 0
    known = [place for place in places if place[1]]
    for place in known:
        offset, block = place
        if found and step_of(block[0]) < step_of(found[-1][1][-1]) and num_searched < MAX_RESUMES:
            num_searched += 1
            resumes = CountedLines(path, start=found[-1][0], stop=offset + 2 * line_bytes).resumed_from
            if resumes:
                found.append((found[-1][0], [{RESUMED_FROM: min(resumes)}]))
        found.append(place)
    return found


def _lines_at(descriptor: int, offset: int, num_bytes: int) -> list[bytes]:
    """The complete lines in these bytes."""
    block = os.pread(descriptor, num_bytes, offset)
    begin = block.find(b"\n") + 1 if offset else 0
    return block[begin : block.rfind(b"\n")].split(b"\n") if block.rfind(b"\n") > begin else []
