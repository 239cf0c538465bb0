"""What a plot of runs shows: panels with series. Decided here, drawn elsewhere, as a picture or as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from paceline.cli.logs.runs import LogsError
from paceline.observe.metrics import Curves, read_curves
from paceline.observe.run_files import RunFiles

Numbers = npt.NDArray[np.float64]
XAxis = Literal["step", "epoch", "time"]

# What the usual metrics are called on an axis, with their unit.
AXIS_LABELS = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "samples_per_s": "samples / s",
    "tokens_per_s": "tokens / s",
    "shares": "micro-batches",
    "waiting": "waiting (part of the time)",
    "time": "time of training (s)",
}
_TIME_UNITS = ((2 * 86400.0, 86400.0, "days"), (2 * 3600.0, 3600.0, "h"), (180.0, 60.0, "min"), (0.0, 1.0, "s"))
# What is set, not measured.
NEVER_SMOOTHED = ("lr", "epoch", "time")
# A picture has a few thousand columns: more points only make it slow.
MAX_POINTS = 4000


@dataclass(frozen=True)
class LoadedRun:
    """A run's metrics, and what it is called among the others."""

    label: str
    metrics: Curves


@dataclass(frozen=True)
class Series:
    """A line. `raw` are the values before smoothing, None if they were not smoothed. `color` is a number: the same run
    or worker has the same in all panels. `is_sparse`: points worth marking, such as evaluations."""

    label: str
    x: Numbers
    y: Numbers
    raw: Numbers | None
    color: int
    is_sparse: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines that share their axes. `is_log`: the y axis is logarithmic."""

    name: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    is_log: bool = False


def load_runs(
    runs: Sequence[RunFiles], *, is_smoothed: bool = False, only: Sequence[str] | None = None
) -> list[LoadedRun]:
    """is_smoothed: a mean over neighbours needs all of them, where otherwise thinned curves do.

    only: names of metrics, or of groups of them, whose numbers will be asked for; None for all.
    """
    loaded = []

    def is_wanted(name: str) -> bool:
        return only is None or name in only or any(name.startswith(f"{each}/") for each in only)

    for files, label in zip(runs, short_labels(runs), strict=True):
        metrics = Curves()
        if files.metrics.is_file():
            metrics = read_curves(
                files.metrics, is_wanted, is_whole=lambda name: is_smoothed and name not in NEVER_SMOOTHED
            )
        if not metrics.num_lines:
            raise LogsError(f"{files.root.name} has no metrics yet: there is nothing to plot")
        loaded.append(LoadedRun(label, metrics))
    return loaded


def short_labels(runs: Sequence[RunFiles]) -> list[str]:
    """The shortest names that tell these runs apart: of the config, with the time of day, or all of it."""
    configs = [files.config_name for files in runs]
    with_time = [f"{files.config_name} {files.time_of_day}".strip() for files in runs]
    for labels in (configs, with_time):
        if len(set(labels)) == len(labels):
            return labels
    return [files.root.name for files in runs]


def make_panels(
    runs: Sequence[LoadedRun],
    *,
    metrics: Sequence[str] = (),
    only_loss: bool = False,
    x_axis: XAxis = "step",
    smooth: int = 1,
    log_scale: bool = False,
) -> list[Panel]:
    """One panel per metric; without a choice the loss with its evaluation, learning rate, gradient norm, throughput,
    and evaluations other than the loss. Several runs share their panels, a line each.

    log_scale: for what was chosen, or without a choice losses and gradient norm, where all values are positive.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.names()))
    chosen = [_checked(metric, names) for metric in metrics] if metrics else _usual(names, only_loss=only_loss)
    scale = _XScale(runs, x_axis)
    panels = [_panel(metric, runs, names, scale, smooth, has_own_choice=bool(metrics)) for metric in chosen]
    drawn = [panel for panel in panels if panel.series]
    if not drawn:
        raise LogsError(f"there is nothing to plot: the metrics hold {', '.join(names) or 'no numbers'}")
    logarithmic = chosen if metrics else ["loss", "grad_norm"]
    return [replace(panel, is_log=log_scale and panel.name in logarithmic and _is_positive(panel)) for panel in drawn]


def moving_mean(values: Numbers, window: int) -> Numbers:
    """Each value's mean with its neighbours, half of `window` on either side; numbers that are not finite left out.

    At the start, where a loss falls steeply, there are no more neighbours on the right than on the left; at the end,
    whose level people read, as many as there are.
    """
    reach = min(window // 2, len(values) - 1)
    finite = np.isfinite(values)
    known = np.where(finite, values, 0.0)
    unit = max(float(np.abs(known).max()) / 1e290, 1.0)  # else a sum of numbers near 1e308 would be infinite
    total = _window_sums(known / unit, reach)
    count = np.round(_window_sums(finite.astype(np.float64), reach))
    return np.where(count > 0, total / np.maximum(count, 1) * unit, np.nan)


def _window_sums(values: Numbers, reach: int) -> Numbers:
    """The sum of each window, over nothing but its own values: running sums would carry a spike's rounding into
    everything after it.

    The values are cut into blocks of a window's length. A window is the end of one block and the beginning of the next.
    """
    length = 2 * reach + 1
    num_blocks = -(-(len(values) + length - 1) // length) + 1
    padded = np.zeros(num_blocks * length)
    padded[reach : reach + len(values)] = values
    blocks = padded.reshape(num_blocks, length)
    heads = blocks.cumsum(axis=1).ravel()
    tails = blocks[:, ::-1].cumsum(axis=1)[:, ::-1].ravel()
    starts = np.arange(len(values))
    sums: Numbers = heads[starts + length - 1] + np.where(starts % length == 0, 0.0, tails[starts])
    sums[:reach] = values.cumsum()[np.minimum(2 * starts[:reach], len(values) - 1)]
    return sums


def _usual(names: Sequence[str], *, only_loss: bool) -> list[str]:
    if only_loss:
        return ["loss"]
    others = [name for name in names if name.startswith("eval/") and name != "eval/loss"]
    return ["loss", *others, "lr", "grad_norm", "samples_per_s"]


def _checked(metric: str, names: Sequence[str]) -> str:
    if metric in names or any(name.startswith(f"{metric}/") for name in names):
        return metric
    groups = [name.partition("/")[0] for name in names if "/" in name]
    known = list(dict.fromkeys([*names, *groups]))
    nearest = get_close_matches(metric, known, n=1)
    hint = f", did you mean {nearest[0]!r}?" if nearest else ":"
    raise LogsError(f"no run has the metric {metric!r}{hint} choose from {', '.join(known)}")


def _panel(
    metric: str, runs: Sequence[LoadedRun], names: Sequence[str], scale: _XScale, smooth: int, *, has_own_choice: bool
) -> Panel:
    series: list[Series] = []
    for number, run in enumerate(runs):
        parts = _parts(metric, run, names, is_alone=len(runs) == 1, has_own_choice=has_own_choice)
        for i, (name, label) in enumerate(parts):
            color = i if len(runs) == 1 else number
            series += _series(run, name, label, color, scale, smooth)
    return Panel(metric, scale.label, AXIS_LABELS.get(metric, metric.replace("_", " ")), tuple(series))


def _parts(
    metric: str, run: LoadedRun, names: Sequence[str], *, is_alone: bool, has_own_choice: bool
) -> list[tuple[str, str]]:
    """Names and labels of the lines that a run has in a panel."""

    def label(part: str) -> str:
        return part if is_alone else f"{run.label} {part}"

    if metric == "loss" and not has_own_choice:
        return [("loss", "training" if is_alone else run.label), ("eval/loss", label("evaluation"))]
    if metric == "samples_per_s" and not has_own_choice and is_alone:
        ranks = range(sum(name.startswith("shares/") for name in names))
        workers = [(f"{metric}@{rank}", f"worker {rank}") for rank in ranks] if len(ranks) > 1 else []
        return [(metric, "all workers" if workers else "samples / s"), *workers]
    inner = [name for name in names if name.startswith(f"{metric}/")]
    if not inner:
        return [(metric, AXIS_LABELS.get(metric, metric) if is_alone else run.label)]
    is_per_worker = all(name.partition("/")[2].isdecimal() for name in inner)
    word = "worker " if is_per_worker else ""
    return [(name, label(f"{word}{name.partition('/')[2]}")) for name in inner]


def _is_positive(panel: Panel) -> bool:
    return all(bool((series.y[np.isfinite(series.y)] > 0).all()) for series in panel.series)


def _series(run: LoadedRun, name: str, label: str, color: int, scale: _XScale, smooth: int) -> Iterable[Series]:
    steps, values = run.metrics.series(name)
    if not np.isfinite(values).any():
        return
    x = scale.at(run.metrics, steps)
    is_sparse = name.startswith("eval/")
    if smooth > 1 and not is_sparse and name not in NEVER_SMOOTHED:
        x, smoothed, raw = _thinned(x, moving_mean(values, smooth), values)
        yield Series(label, x, smoothed, raw, color)
    else:
        x, values = _thinned(x, values)
        yield Series(label, x, values, None, color, is_sparse)


def _thinned(*columns: Numbers) -> tuple[Numbers, ...]:
    """No more than `MAX_POINTS` rows. Of each stretch the rows where the last column is lowest and highest stay, so
    that no peak is lost."""
    length = len(columns[0])
    if length <= MAX_POINTS:
        return columns
    edges = np.linspace(0, length, MAX_POINTS // 2 + 1).astype(int)
    values = np.where(np.isfinite(columns[-1]), columns[-1], 0.0)
    kept = {0, length - 1}
    for begin, end in pairwise(edges):
        kept.update((begin + int(np.argmin(values[begin:end])), begin + int(np.argmax(values[begin:end]))))
    rows = np.array(sorted(kept))
    return tuple(column[rows] for column in columns)


class _XScale:
    """From steps to places on the x axis, in one unit for all runs."""

    def __init__(self, runs: Sequence[LoadedRun], axis: XAxis) -> None:
        self._axis = axis
        self._unit_s = 1.0
        self.label: str = axis
        if axis == "time":
            longest_s = max((run.metrics.last("time") or 0.0 for run in runs), default=0.0)
            self._unit_s, unit = next((size, unit) for least, size, unit in _TIME_UNITS if longest_s >= least)
            self.label = f"time of training ({unit})"

    def at(self, metrics: Curves, steps: npt.NDArray[np.int64]) -> Numbers:
        if self._axis == "step" or not len(steps):
            return steps.astype(np.float64)
        known_steps, known = metrics.series(self._axis)
        if not len(known):
            raise LogsError(f"the metrics do not tell the {self._axis}: choose --x-axis step")
        if self._axis == "epoch":
            known = _inside_epochs(known_steps, known)
        return np.interp(steps, known_steps, known / self._unit_s)


def _inside_epochs(steps: npt.NDArray[np.int64], epochs: Numbers) -> Numbers:
    """How many epochs were done at a step, from the number of the epoch each step belonged to.

    An epoch is as long as the lines show: up to the first line of the next. The last one, which may be under way, is
    taken to be as long as the longest before it.
    """
    if not np.array_equal(epochs, np.floor(epochs)):
        return epochs  # the run wrote down the fraction itself
    firsts = np.flatnonzero(np.diff(epochs, prepend=epochs[0] - 1))
    # An epoch begins behind the last step of the one before; the first of all behind step 0.
    begins = np.concatenate([[0 if epochs[0] == 0 else steps[0]], steps[firsts[1:] - 1]])
    lengths = [*np.diff(begins), 0]
    lengths[-1] = max(steps[-1] - begins[-1], *lengths)
    place = np.cumsum(np.diff(epochs, prepend=epochs[0]) != 0)
    done: Numbers = epochs + (steps - begins[place]) / np.maximum(np.array(lengths)[place], 1)
    return done
