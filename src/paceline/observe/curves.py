"""A file of metrics as curves: read in blocks, in memory that does not depend on the file's length.

A curve of more than `MAX_POINTS` points is thinned while it is read: of each stretch of steps the lowest and the
highest value stay, so that extremes and their steps are exact and a plot looks the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.json_lines import NOT_FINITE, Blocks, is_count, is_number

RESUMED_FROM = "resumed_from"

Steps = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

MAX_POINTS = 16_384
# Further points are collected before they are thinned together.
_BUFFER_POINTS = 4 * MAX_POINTS

_NUMBERS = frozenset({int, float})
_MISSING = type(None)


class Curve:
    """The numbers of one name, by step. Of several for one step the newest counts."""

    def __init__(self, *, is_whole: bool = False) -> None:
        self._is_whole = is_whole
        self._steps: list[Steps] = []
        self._values: list[Values] = []
        self._num_points = 0
        self._num_finite = 0
        self._mean = 0.0

    def add(self, steps: Steps, values: Values) -> None:
        self._steps.append(steps)
        self._values.append(values)
        self._num_points += len(steps)
        finite = values[np.isfinite(values)]
        if len(finite):
            total = self._num_finite + len(finite)
            # Divided before they are added: a sum of numbers near 1e308 would be infinite.
            self._mean = self._mean * (self._num_finite / total) + float(np.sum(finite / total))
            self._num_finite = total
        if self._num_points > _BUFFER_POINTS and not self._is_whole:
            self._settle()

    @property
    def points(self) -> tuple[Steps, Values]:
        """In the order of the steps."""
        self._settle()
        return (self._steps[0], self._values[0]) if self._steps else (np.empty(0, np.int64), np.empty(0))

    @property
    def mean(self) -> float | None:
        """Of all finite values; None if there is none."""
        return self._mean if self._num_finite else None

    def _settle(self) -> None:
        if len(self._steps) > 1 or self._num_points > MAX_POINTS:
            steps, values = _ordered(np.concatenate(self._steps), np.concatenate(self._values))
            if len(steps) > MAX_POINTS and not self._is_whole:
                kept = _extremes(steps, values)
                steps, values = steps[kept], values[kept]
            self._steps, self._values, self._num_points = [steps], [values], len(steps)


class Curves:
    """What a file of metrics holds. `last_step`: 0 if it holds no step; `num_unreadable`: lines that were left out.

    `workers`: for each number of workers, the sum of their shares, the sum of their waiting, and how many lines told
    the latter; `num_workers` is the newest of those numbers, None if no line has shares.
    """

    def __init__(self) -> None:
        self.last_step = 0
        self.num_lines = 0
        self.num_unreadable = 0
        self.num_workers: int | None = None
        self.workers: dict[int, tuple[Values, Values, int]] = {}
        self._curves: dict[str, Curve | None] = {}

    def names(self) -> list[str]:
        """Everything there is a number of, `step` left out: "loss", "eval/loss", "shares/0"; by first appearance."""
        return [name for name in self._curves if "@" not in name]

    def series(self, name: str) -> tuple[Steps, Values]:
        """The steps that have a number of this name, and the numbers; "samples_per_s@1" is worker 1's part of it."""
        return (self._curves.get(name) or Curve()).points

    def mean(self, name: str) -> float | None:
        return (self._curves.get(name) or Curve()).mean

    def last(self, name: str) -> float | None:
        """The newest number of this name."""
        values = self.series(name)[1]
        return float(values[-1]) if len(values) else None

    def is_skipped(self, name: str) -> bool:
        """Whether its numbers are not wanted, which is known once one was seen."""
        return name in self._curves and self._curves[name] is None

    def curve(self, name: str, is_wanted: Callable[[str], bool], is_whole: Callable[[str], bool]) -> Curve | None:
        if name not in self._curves:
            self._curves[name] = Curve(is_whole=is_whole(name)) if is_wanted(name) else None
        return self._curves[name]


def read_curves(
    path: Path,
    is_wanted: Callable[[str], bool] = lambda _: True,
    *,
    is_whole: Callable[[str], bool] = lambda _: False,
    last_step: int | None = None,
) -> Curves:
    """A file's metrics as they stand, without what was superseded by a resumption.

    is_wanted: whether a name's numbers are kept; of others only the name. is_whole: whether a curve is kept without
    thinning, which takes 16 bytes for each of its points. last_step: leave out what is about later steps.
    """
    curves = Curves()
    limits = _limits(path, math.inf if last_step is None else last_step)
    blocks = Blocks(path)
    segment = 0
    for block in blocks.parsed():
        for records, ends_segment in _segments(block):
            steps, kept = _steps(records, limits[min(segment, len(limits) - 1)], curves)
            if kept:
                _add(curves, steps, kept, is_wanted, is_whole)
            segment += ends_segment
    curves.num_unreadable += blocks.num_unreadable
    return curves


def _limits(path: Path, last_step: float) -> list[float]:
    """The last step that counts, for the lines before each resumption, and for those after the last one."""
    resumed = [
        record[RESUMED_FROM]
        for block in Blocks(path).parsed(containing=f'"{RESUMED_FROM}"'.encode())
        for record in block
        if _is_resumption(record)
    ]
    limits = [last_step]
    for step in reversed(resumed):
        limits.append(min(step, limits[-1]))
    return limits[::-1]


def _is_resumption(record: Any) -> bool:
    return isinstance(record, dict) and "step" not in record and is_count(record.get(RESUMED_FROM))


def _segments(block: list[Any]) -> Iterator[tuple[list[Any], bool]]:
    """The block's records, cut at resumptions; whether one follows."""
    begin = 0
    if any(RESUMED_FROM in record for record in block if isinstance(record, dict)):
        for end, record in enumerate(block):
            if _is_resumption(record):
                yield block[begin:end], True
                begin = end + 1
    yield (block[begin:] if begin else block), False


def _steps(records: list[Any], limit: float, curves: Curves) -> tuple[Steps, list[dict[str, Any]]]:
    """The records that count, with their steps."""
    known = [record for record in records if type(record) is dict]
    found: list[Any] = [record.get("step") for record in known]
    if set(map(type, found)) - {int} or (found and not 0 <= min(found) <= max(found) < 1 << 63):
        known = [record for record in known if is_count(record.get("step"))]
        found = [record["step"] for record in known]
    curves.num_unreadable += len(records) - len(known)
    steps = np.array(found, np.int64)
    if len(steps) and steps.max() > limit:
        known = [record for record in known if record["step"] <= limit]
        steps = steps[steps <= limit]
    curves.num_lines += len(known)
    if len(steps):
        curves.last_step = max(curves.last_step, int(steps.max()))
    return steps, known


def _add(
    curves: Curves,
    steps: Steps,
    records: Sequence[Mapping[str, Any]],
    is_wanted: Callable[[str], bool],
    is_whole: Callable[[str], bool],
) -> None:
    def keep(name: str, rows: npt.NDArray[np.intp] | None, values: Values) -> None:
        if (curve := curves.curve(name, is_wanted, is_whole)) is not None and len(values):
            curve.add(steps if rows is None else steps[rows], values)

    for name in _keys(records):
        if name != "step" and not curves.is_skipped(name):
            for inner, rows, values in _columns(name, [record.get(name) for record in records], None):
                keep(inner, rows, values)
    if any("shares" in record for record in records):
        _add_workers(curves, records, keep)


def _add_workers(curves: Curves, records: Sequence[Mapping[str, Any]], keep: Callable[..., None]) -> None:
    """What is told of each worker, by the number of workers."""
    by_size: dict[int, list[int]] = {}
    for row, record in enumerate(records):
        if type(shares := record.get("shares")) is list and shares:
            by_size.setdefault(len(shares), []).append(row)
    newest = -1
    for size, rows in by_size.items():
        whole = _matrix([records[row]["shares"] for row in rows])
        if whole is None:  # something is no number
            rows = [row for row in rows if _matrix([records[row]["shares"]]) is not None]
            whole = _matrix([records[row]["shares"] for row in rows])
        if whole is None:
            continue
        if rows[-1] > newest:
            newest, curves.num_workers = rows[-1], size
        _add_waiting(curves, whole, [records[row].get("waiting") for row in rows])
        if size > 1:
            totals = whole.sum(axis=1)
            parts = whole / np.where(totals > 0, totals, np.nan)[:, None]
            for _, places, rates in _columns("", [records[row].get("samples_per_s") for row in rows], None):
                own = parts if places is None else parts[places]
                told = np.array(rows, np.intp) if places is None else np.array(rows, np.intp)[places]
                is_known = np.isfinite(own[:, 0])
                for rank in range(size):
                    keep(f"samples_per_s@{rank}", told[is_known], (rates * own[:, rank])[is_known])


def _add_waiting(curves: Curves, shares: Values, column: Sequence[Any]) -> None:
    size = shares.shape[1]
    told = [waits for waits in column if type(waits) is list and len(waits) == size]
    waiting = _matrix(told)
    if waiting is None:
        told = [waits for waits in told if _matrix([waits]) is not None]
        waiting = _matrix(told)
    waited = np.zeros(size) if waiting is None else waiting.sum(axis=0)
    before = curves.workers.get(size, (np.zeros(size), np.zeros(size), 0))
    curves.workers[size] = before[0] + shares.sum(axis=0), before[1] + waited, before[2] + len(told)


def _matrix(rows: Sequence[list[Any]]) -> Values | None:
    """Lists of one length as the rows of a matrix; None if there is none, or one holds anything but numbers."""
    flat = list(chain.from_iterable(rows))
    kinds = set(map(type, flat))
    values = _as_numbers(flat, kinds) if flat and kinds <= _NUMBERS else None
    return None if values is None else values.reshape(len(rows), -1)


def _columns(
    name: str, column: Sequence[Any], rows: npt.NDArray[np.intp] | None
) -> Iterator[tuple[str, npt.NDArray[np.intp] | None, Values]]:
    """A column of JSON values as columns of numbers: their flat names, the rows that have one (None: all), the values.

    `rows`: where the column's values stand, None if one stands in each row.
    """
    kinds = set(map(type, column))
    if kinds <= _NUMBERS:
        values = _as_numbers(column, kinds)
        if values is not None:
            yield name, rows, values
            return
    if _MISSING in kinds:
        present = [i for i, value in enumerate(column) if value is not None]
        if present:
            places = np.array(present, np.intp)
            yield from _columns(name, [column[i] for i in present], places if rows is None else rows[places])
        return
    for kind in (dict, list):
        if kind in kinds:
            yield from _inner_columns(name, column, rows, kind)
    if kinds <= {dict, list}:
        return
    scalars = [(i, number) for i, value in enumerate(column) if (number := _number(value)) is not None]
    if scalars:
        places = np.array([i for i, _ in scalars], np.intp)
        yield name, places if rows is None else rows[places], np.array([value for _, value in scalars], np.float64)


def _inner_columns(
    name: str, column: Sequence[Any], rows: npt.NDArray[np.intp] | None, kind: type
) -> Iterator[tuple[str, npt.NDArray[np.intp] | None, Values]]:
    places = np.array([i for i, value in enumerate(column) if type(value) is kind], np.intp)
    outer = places if rows is None else rows[places]
    inside = [column[i] for i in places]
    if kind is list:
        if len(set(map(len, inside))) == 1 and (matrix := _matrix(inside)) is not None:
            yield from ((f"{name}/{i}", outer, matrix[:, i]) for i in range(matrix.shape[1]))
            return
        inside = [{str(i): item for i, item in enumerate(items)} for items in inside]
    for key in _keys(inside):
        yield from _columns(f"{name}/{key}", [values.get(key) for values in inside], outer)


def _keys(records: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """All keys, by first appearance. Most records have the keys of the one before."""
    found: dict[str, None] = {}
    before: Iterable[str] = ()
    for record in records:
        if (keys := record.keys()) != before:
            found.update(dict.fromkeys(keys))
            before = keys
    return found


def _as_numbers(column: Sequence[Any], kinds: set[type]) -> Values | None:
    """None if an integer is too large to be a metric."""
    try:
        values = np.array(column, np.float64)
    except OverflowError:
        return None
    if int in kinds and np.abs(values).max() >= 2.0**63:
        return None
    return values


def _number(value: Any) -> float | None:
    if type(value) is str:
        return NOT_FINITE.get(value)
    return float(value) if is_number(value) else None


def _ordered(steps: Steps, values: Values) -> tuple[Steps, Values]:
    """By step, and of several values for a step the last."""
    gaps = np.diff(steps)
    if (gaps > 0).all():
        return steps, values
    if (gaps < 0).any():
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
    newest = np.append(np.diff(steps) != 0, True)
    return steps[newest], values[newest]


def _extremes(steps: Steps, values: Values) -> npt.NDArray[np.intp]:
    """Where the lowest and the highest value of each of MAX_POINTS / 2 - 1 equal stretches of steps stand."""
    span = float(steps[-1]) - float(steps[0]) + 1.0
    stretch = ((steps - steps[0]) / span * (MAX_POINTS // 2 - 1)).astype(np.int64)
    begins = np.flatnonzero(np.diff(stretch, prepend=-1))
    counts = np.diff(np.append(begins, len(steps)))
    finite = np.isfinite(values)
    kept = [np.array([0, len(steps) - 1], np.intp)]
    for sign in (1.0, -1.0):
        ranked = np.where(finite, sign * values, np.inf)
        is_lowest = np.flatnonzero(ranked == np.repeat(np.minimum.reduceat(ranked, begins), counts))
        kept.append(is_lowest[np.flatnonzero(np.diff(stretch[is_lowest], prepend=-1))])
    return np.unique(np.concatenate(kept))
