"""All curves of a metrics file, read incrementally: no extreme is missed in a file of any length.

A curve has up to `MAX_POINTS` points, the lowest and the highest of each interval of steps. Reading takes a few seconds
per million lines, so a long file is first shown as a sample (see `curve_window`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.observe.curve_window import Series
from paceline.observe.json_lines import LineReader
from paceline.observe.metrics import RESUMED_FROM, Curve, columns_of, is_resume, is_step

# Bounds the memory of an index to some 80 MB. Further names are left out.
MAX_NAMES = 300


class CurveIndex:
    """Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._reader = LineReader(path)
        self._curves: dict[str, Curve] = {}

    @property
    def num_bytes(self) -> int:
        """How much of the file was read."""
        return self._reader.offset

    @property
    def is_current(self) -> bool:
        return self._reader.is_current

    def read(self) -> Iterator[None]:
        """Read new lines of the file, about a megabyte per iteration."""
        for block in self._reader.blocks():
            for is_a_resume, records in groupby(block, is_resume):
                if is_a_resume:
                    step = min(record[RESUMED_FROM] for record in records)
                    for curve in self._curves.values():
                        curve.drop_after(step)
                else:
                    self._add([record for record in records if is_step(record)])
            yield

    def curves(self) -> dict[str, Series]:
        """By name. The arrays do not change when more is read."""
        return {name: Series(name, *curve.points, curve.is_thinned) for name, curve in self._curves.items()}

    def _add(self, records: Sequence[dict[str, Any]]) -> None:
        for name, (steps, values) in columns_of(records).items():
            if name in self._curves or len(self._curves) < MAX_NAMES:
                self._curves.setdefault(name, Curve()).add(steps, values)
