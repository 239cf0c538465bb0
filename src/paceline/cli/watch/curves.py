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
from paceline.observe.metrics import Curves, Steps, Values, extremes

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
        index = indexes.curves(run.files.metrics) if indexes is not None and window.is_sampled else None
        if index is not None:
            window = completed(window, index, wanted, first, last, points)
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
    window: Window, index: Mapping[str, Series], wanted: Sequence[str] | None, first: int, last: float, points: int
) -> Window:
    """The window with the curves of an index, between two steps. The sample also has lines that were superseded."""
    sampled = {each.name: each for each in window.series}
    names, wants = list(dict.fromkeys([*window.names, *index])), Curves(wanted).wants
    is_part = first > window.first_step or last < window.last_step
    series, is_sampled = [], False
    for name in filter(wants, names):
        found, sample = index.get(name), sampled.get(name)
        if found is None:  # one of too many
            is_sampled = True
            series += [] if sample is None else [sample]
            continue
        inside = (found.steps >= first) & (found.steps <= last)
        steps, values, is_thinned = found.steps[inside], found.values[inside], found.is_thinned
        if is_thinned and is_part and len(steps) < points:  # the index is coarser than the picture
            is_sampled = True
            if sample is not None:
                steps, newest = np.unique(np.concatenate([steps, sample.steps]), return_index=True)
                values = np.concatenate([values, sample.values])[newest]
        if len(steps) > points:
            kept = extremes(steps, values, points)
            steps, values, is_thinned = steps[kept], values[kept], True
        series += [Series(name, steps, values, is_thinned)] if len(steps) else []
    return replace(window, names=names, series=series, is_sampled=is_sampled)


def _positions(axis: str, known_steps: Steps, known: Values, steps: Steps) -> Values:
    if axis == "epoch" and np.array_equal(known, np.floor(known)):
        known_steps, known = epoch_starts(known_steps, known)
    return np.interp(steps, known_steps, known)
