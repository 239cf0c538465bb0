"""A run's metrics: one JSON line per logged step, in `metrics.jsonl`.

    {"step": 40, "time": 12.5, "epoch": 0, "loss": 2.31, "lr": 0.001, "grad_norm": 0.8, "samples_per_s": 812.0,
     "tokens_per_s": 52100.0, "shares": [6, 2], "waiting": [0.01, 0.04], "eval": {"loss": 2.4}}

`step` counts completed steps. `time` is seconds of training: the time between an interruption and the resumption is
not in it. `shares` are micro-batches and `waiting` parts of the time (0 to 1), one per worker. A line holds what its
writer knows: lines of the same step add up, the newer value of a name counts. `{"resumed_from": 30}` says that the run
went on from step 30: what stands above it about later steps is superseded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.curves import RESUMED_FROM, read_curves
from paceline.observe.json_lines import LineReader, LineWriter, is_count, is_number, read_last_lines

Row = dict[str, Any]


class MetricsWriter:
    """Appends metrics to a file; a `Logger`. For rank 0.

    start_step: completed steps when the run starts or goes on. What the file says about later steps is superseded, and
    its clock goes on from the newest line that counts.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        is_known = path.exists() and read_curves(path, lambda _: False).num_lines > 0
        before_s = 0.0
        if is_known:
            times = read_curves(path, lambda name: name == "time", last_step=start_step).series("time")[1]
            before_s = float(max(times, default=0.0))
        self._lines = LineWriter(path)
        self._began = monotonic() - before_s
        if is_known:
            self._lines.write({RESUMED_FROM: start_step})

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """One line. Values are numbers, lists of one number per worker, or mappings such as `{"eval": {"loss": 2}}`."""
        line = {"step": step, "time": round(monotonic() - self._began, 3), **values}
        self._lines.write(line | {"step": int(step)})

    def close(self) -> None:
        self._lines.close()


@dataclass(frozen=True)
class Metrics:
    """What is known of a run's steps: `rows` in the order of their steps, one each.

    `num_unreadable` counts lines that were passed over: a writer of another kind, or a damaged disk.
    """

    rows: Sequence[Row] = ()
    num_unreadable: int = 0

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    def names(self) -> list[str]:
        """Everything there is a number of, `step` left out: "loss", "eval/loss", "shares/0"; by first appearance."""
        found: dict[str, None] = {}
        seen = set()
        for row in self.rows:
            if (shape := _shape(row)) not in seen:  # most rows are like another
                seen.add(shape)
                found.update(dict.fromkeys(name for name, _ in flat_items(row)))
        found.pop("step", None)
        return list(found)

    def series(self, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The steps that have a number of this name, and the numbers."""
        steps, values = [], []
        for row in self.rows:
            value = _pick(row, name)
            if is_number(value):
                steps.append(row["step"])
                values.append(value)
        return np.array(steps, np.int64), np.array(values, np.float64)

    def last(self, name: str) -> float | None:
        """The newest number of this name."""
        for row in reversed(self.rows):
            value = _pick(row, name)
            if is_number(value):
                return float(value)
        return None


@dataclass
class MetricsReader:
    """Follows a file of metrics that may still be written."""

    path: Path
    _rows: dict[int, Row] = field(default_factory=dict, init=False)
    _num_strange: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._lines = LineReader(self.path)

    def poll(self) -> bool:
        """Read what was added since the last call; whether that was anything."""
        records = self._lines.read()
        self.take(records)
        return bool(records)

    def take(self, records: Iterable[Row]) -> None:
        """Lines that were read elsewhere."""
        for record in records:
            self._take(record)

    @property
    def metrics(self) -> Metrics:
        rows = [self._rows[step] for step in sorted(self._rows)]
        return Metrics(rows, self._lines.num_unreadable + self._num_strange)

    def _take(self, record: Row) -> None:
        step: Any = record.get("step", record.get(RESUMED_FROM))
        if not is_count(step):
            self._num_strange += 1
        elif "step" in record:
            earlier = self._rows.get(step)
            self._rows[step] = record if earlier is None else _merged(earlier, record)
        else:
            self._rows = {known: row for known, row in self._rows.items() if known <= step}


def read_metrics(path: Path) -> Metrics:
    """All of a file's metrics, as they stand."""
    reader = MetricsReader(path)
    reader.poll()
    return reader.metrics


def read_newest_metrics(path: Path) -> Metrics:
    """Those at the end of the file, however long it is: for lists of many runs."""
    reader = MetricsReader(path)
    reader.take(read_last_lines(path))
    return reader.metrics


def flat_items(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """All numbers in there by flat name: "loss", "eval/loss", "shares/0". Scalars of torch and NumPy are numbers."""
    for name, value in values.items():
        if isinstance(value, list | tuple):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in flat_items(value))
        elif (number := _number(value)) is not None:
            yield name, number


def _number(value: Any) -> float | None:
    if not is_number(value):
        try:
            value = value.item()
        except (AttributeError, ValueError, RuntimeError):  # no scalar
            return None
    return value if is_number(value) else None


def _pick(row: Row, name: str) -> Any:
    """The value of a flat name. Most are no deeper than the row."""
    value = row.get(name)
    if value is not None or "/" not in name:
        return value
    head, _, rest = name.partition("/")
    inner = row.get(head)
    if isinstance(inner, dict):
        return _pick(inner, rest)
    if isinstance(inner, list) and rest.isdecimal() and int(rest) < len(inner):
        return inner[int(rest)]
    return None


def _shape(value: Any) -> Any:
    """The same for values that hold the same names."""
    if type(value) is dict:
        return tuple(value), tuple(map(_shape, value.values()))
    return (list, *map(type, value)) if type(value) is list else type(value)


def _merged(earlier: Row, later: Row) -> Row:
    both = earlier | later
    for name, value in earlier.items():
        if isinstance(value, dict) and isinstance(later.get(name), dict):
            both[name] = value | later[name]
    return both
