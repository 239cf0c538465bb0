"""The curves of a run as the API shows them, by step, epoch or time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.cli.logs.panels import epoch_starts
from paceline.cli.watch.indexes import Indexes
from paceline.cli.watch.runs import RunEntry
from paceline.cli.watch.safe_files import file_stat
from paceline.observe.curve_window import Series, Window, read_window
from paceline.observe.metrics import Steps, Values, extremes

AXES = ("step", "epoch", "time")
MIN_POINTS, DEFAULT_POINTS, MAX_POINTS = 16, 2000, 20_000


def curves_of(
    run: RunEntry,
    names: Sequence[str] = (),
    first: int = 0,
    last: float = math.inf,
    points: int = DEFAULT_POINTS,
    axis: str = "step",
    *,
    exact: bool = False,
    indexes: Indexes | None = None,
) -> dict[str, Any]:
    """See docs/watch-api.md. names: empty for all. indexes: what a sample may have missed is added from there."""
    if file_stat(run.files.metrics) is None:
        window = Window()
    else:
        wanted = [*names, axis] if names and axis != "step" else names or None
        window = read_window(run.files.metrics, wanted, first, last, points=points, exact=exact)
        known_curves = indexes.curves(run.files.metrics) if indexes is not None and window.is_sampled else None
        if known_curves is not None:
            window = completed(window, known_curves, first, last, points)
    known = next((each for each in window.series if each.name == axis), None)
    series = []
    for each in window.series:
        if names and each.name == axis and axis not in names:
            continue
        found = {
            "name": each.name,
            "steps": each.steps.tolist(),
            "values": each.values.tolist(),
            "is_thinned": each.is_thinned,
        }
        if axis != "step":
            found["x"] = [] if known is None else _positions(axis, known.steps, known.values, each.steps).tolist()
        series.append(found)
    return {
        "from": first,
        "to": window.last_step if last == math.inf else int(last),
        "first_step": window.first_step,
        "last_step": window.last_step,
        "is_sampled": window.is_sampled,
        "offset": window.offset,
        "names": window.names,
        "series": series,
    }


def completed(
    window: Window, known: Mapping[str, tuple[Steps, Values]], first: int, last: float, points: int
) -> Window:
    """A sampled window with the extremes that an index has, between two steps."""
    series = []
    for each in window.series:
        steps, values = known.get(each.name, (each.steps[:0], each.values[:0]))
        inside = (steps >= first) & (steps <= last)
        steps, values = np.concatenate([steps[inside], each.steps]), np.concatenate([values[inside], each.values])
        steps, newest = np.unique(steps, return_index=True)
        values = values[newest]
        if len(steps) > points:
            kept = extremes(steps, values, points)
            steps, values = steps[kept], values[kept]
        series.append(Series(each.name, steps, values, is_thinned=True))
    # In a small part of a run the index is coarser than the picture.
    counts = [int(np.count_nonzero((own >= first) & (own <= last))) for own, _ in known.values()]
    is_part = first > window.first_step or last < window.last_step
    is_coarse = is_part and max(counts, default=0) < points
    is_sampled = is_coarse or any(each.name not in known for each in window.series)
    return replace(window, series=series, is_sampled=is_sampled)


def _positions(axis: str, known_steps: Steps, known: Values, steps: Steps) -> Values:
    if axis == "epoch" and np.array_equal(known, np.floor(known)):
        known_steps, known = epoch_starts(known_steps, known)
    return np.interp(steps, known_steps, known)
