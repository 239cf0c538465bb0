"""The content of a plot: panels with series. `picture` and `text_plot` draw them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

import numpy as np
import numpy.typing as npt

from paceline.checkpoint.folders import complete_steps
from paceline.cli.commands import CommandError
from paceline.cli.logs.labels import run_labels
from paceline.observe.events import read_world_changes
from paceline.observe.metrics import WORKER_RATE, Curve, Curves, read_curves
from paceline.observe.run_files import RunFiles
from paceline.observe.summary import LOWER_IS_BETTER

Numbers = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]
XAxis = Literal["step", "epoch", "time"]

AXIS_LABELS = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "samples_per_s": "samples / s",
    "tokens_per_s": "tokens / s",
    "shares": "micro-batches",
    "waiting": "waiting (part of the time)",
    "time": "time of training (s)",
}
# Other tools' names of metrics. `eval_loss` is `eval/loss`, and so on.
OTHER_NAMES = {
    "learning_rate": "lr",
    "train_loss": "loss",
    "training_loss": "loss",
    "gradient_norm": "grad_norm",
    "throughput": "samples_per_s",
}
# From this many seconds on, the length of the unit in seconds, and its name.
_TIME_UNITS = ((2 * 86400.0, 86400.0, "days"), (2 * 3600.0, 3600.0, "h"), (180.0, 60.0, "min"), (0.0, 1.0, "s"))
# Not measured, so not noisy.
NEVER_SMOOTHED = ("lr", "epoch", "time")
# Rates of single intervals are noisy: by default they are smoothed over this part of the run.
RATE_WINDOWS = 15


@dataclass(frozen=True, eq=False)
class Series:
    """A line. `color` is an index: a run or worker has the same one in all panels.

    `is_sparse`: every point is marked, as for evaluations. `is_faint`: the original values behind a smoothed line.
    """

    label: str
    x: Numbers
    y: Numbers
    color: int
    is_sparse: bool = False
    is_faint: bool = False
    name: str = ""  # of the metric

    @property
    def last(self) -> float:
        """The last finite value."""
        return float(self.y[np.isfinite(self.y)][-1])


@dataclass(frozen=True)
class Mark:
    """Something that happened at `x`. "best": the best evaluation, at height `y`; the others have none.

    "world": workers left and joined; `text` says how many.
    """

    kind: Literal["resume", "checkpoint", "best", "world"]
    x: float
    y: float | None = None
    color: int = 0
    text: str = ""


@dataclass(frozen=True)
class Panel:
    """Lines in the same axes. `is_log`: the y axis is logarithmic."""

    name: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    is_log: bool = False
    marks: tuple[Mark, ...] = ()


def make_panels(
    runs: Sequence[RunFiles],
    *,
    metrics: Sequence[str] = (),
    only_loss: bool = False,
    x_axis: XAxis = "step",
    smooth: int = 1,
    log_scale: bool = False,
) -> list[Panel]:
    """One panel per metric, by default for loss, evaluations, learning rate, gradient norm and throughput. Every run
    has a line in each panel.

    log_scale: for the chosen metrics, by default for losses and the gradient norm, if all values are positive.
    """
    metrics = [_own_name(metric) for metric in metrics]
    usual = ["loss", "eval/loss"] if only_loss else ["loss", "eval", "lr", "grad_norm", "samples_per_s", WORKER_RATE]
    needed = [*(metrics or usual), x_axis]
    loaded = [_read(files, needed, is_whole=smooth > 1) for files in runs]
    names = list(dict.fromkeys(name for curves in loaded for name in curves.names()))
    evaluations = [name for name in names if name.startswith("eval/") and name != "eval/loss"]
    default = ["loss"] if only_loss else ["loss", *evaluations, "lr", "grad_norm", "samples_per_s"]
    x_label, x_of = _x_axis(loaded, x_axis)
    panels, labels = [], run_labels(runs)
    for metric in [_checked(metric, names) for metric in metrics] or default:
        series: list[Series] = []
        for number, (run_label, curves) in enumerate(zip(labels, loaded, strict=True)):
            lines = _lines(metric, names, None if len(runs) == 1 else run_label, is_default=not metrics)
            for i, (name, label) in enumerate(lines):
                series += _series(curves, name, label, i if len(runs) == 1 else number, smooth, x_of)
        can_be_log = log_scale and (bool(metrics) or metric in ("loss", "grad_norm"))
        is_log = can_be_log and all((one.y[np.isfinite(one.y)] > 0).all() for one in series)
        if series:
            y_label = AXIS_LABELS.get(metric, metric.replace("_", " "))
            marks = [] if len(runs) > 1 else _marks(runs[0], loaded[0], x_of, has_checkpoints=metric == "loss")
            marks += [mark for one in series if (mark := _best(one)) is not None]
            panels.append(Panel(metric, x_label, y_label, tuple(series), is_log, tuple(marks)))
    if not panels:
        raise CommandError(f"nothing to plot: the metrics are {', '.join(names) or 'empty'}")
    return panels


def _marks(
    files: RunFiles, curves: Curves, x_of: Callable[[Curves, Steps], Numbers], *, has_checkpoints: bool
) -> list[Mark]:
    """The run's resumes, changes of its workers, and checkpoints."""
    saved = complete_steps(files.checkpoints) if has_checkpoints else []
    changes = [change for change in read_world_changes(files) if 0 < change.step <= curves.last_step]
    at = x_of(curves, np.array([change.step for change in changes], np.int64))
    marks = [Mark("world", float(x), text=change.label) for x, change in zip(at, changes, strict=True)]
    # If rank 0 was lost, the next one recorded a resume at the same step.
    resumed = [step for step in curves.resumed_from if all(change.step != step for change in changes)]
    for kind, steps in (("resume", resumed), ("checkpoint", saved)):
        steps = [step for step in steps if 0 < step <= curves.last_step]
        marks += [Mark(kind, float(x)) for x in x_of(curves, np.array(steps, np.int64))]  # type: ignore[arg-type]
    return marks


def _best(series: Series) -> Mark | None:
    """The best of several evaluations."""
    finite = np.isfinite(series.y)
    if not series.is_sparse or finite.sum() < 2:
        return None
    is_low = any(word in series.name for word in LOWER_IS_BETTER)
    y = np.where(finite, series.y if is_low else -series.y, np.inf)
    return Mark("best", float(series.x[y.argmin()]), float(series.y[y.argmin()]), series.color)


def _read(files: RunFiles, needed: Sequence[str], *, is_whole: bool) -> Curves:
    """needed: names of metrics, or of groups of metrics. is_whole: do not thin long curves."""
    curves = read_curves(files.metrics, needed, is_whole=is_whole) if files.metrics.is_file() else Curves()
    if not curves.num_lines:
        raise CommandError(f"{files.root.name} has no metrics yet: there is nothing to plot")
    return curves


def moving_mean(values: Numbers, window: int) -> Numbers:
    """Each value's mean with its neighbors, `window // 2` on either side, ignoring values that are not finite.

    At the start the window is cut to be symmetric, since a loss falls steeply there. At the end it is not: the last
    values are read as the level reached. Windows are summed one by one: with running sums, a spike's rounding errors
    would affect all values after it.
    """
    reach = min(window // 2, len(values) - 1)
    cut_ends = np.minimum(2 * np.arange(reach), len(values) - 1)

    def window_sums(numbers: Numbers) -> Numbers:
        sums: Numbers = np.convolve(numbers, np.ones(2 * reach + 1))[reach : reach + len(numbers)]
        sums[:reach] = numbers.cumsum()[cut_ends]
        return sums

    finite = np.isfinite(values)
    known = np.where(finite, values, 0.0)
    unit = max(float(np.abs(known).max()) / 1e290, 1.0)  # the sum of values near 1e308 would overflow
    counts = np.round(window_sums(finite.astype(np.float64)))
    return np.where(counts > 0, window_sums(known / unit) / np.maximum(counts, 1) * unit, np.nan)


def _own_name(metric: str) -> str:
    name = OTHER_NAMES.get(metric, metric)
    return f"eval/{name[5:]}" if name.startswith("eval_") else name


def _checked(metric: str, names: Sequence[str]) -> str:
    known = list(dict.fromkeys([*names, *(name.partition("/")[0] for name in names if "/" in name)]))
    if metric in known or any(name.startswith(f"{metric}/") for name in names):
        return metric
    nearest = get_close_matches(metric, known, n=1)
    hint = f", did you mean {nearest[0]!r}?" if nearest else ":"
    choices = ", ".join("learning_rate" if name == "lr" else name for name in known)
    raise CommandError(f"no run has the metric {metric!r}{hint} choose from {choices}")


def _lines(metric: str, names: Sequence[str], run: str | None, *, is_default: bool) -> list[tuple[str, str]]:
    """Names and labels of a run's lines in a panel. `run`: the run's label, None if it is the only one."""

    def label(part: str) -> str:
        return part if run is None else f"{run} {part}"

    if is_default and metric == "loss":
        return [("loss", run or "training"), ("eval/loss", label("evaluation"))]
    if is_default and metric == "samples_per_s" and run is None:
        num_workers = sum(name.startswith("shares/") for name in names)
        workers = [(f"{WORKER_RATE}{rank}", f"worker {rank}") for rank in range(num_workers if num_workers > 1 else 0)]
        return [(metric, "all workers" if workers else "samples / s"), *workers]
    inner = [name.partition("/")[2] for name in names if name.startswith(f"{metric}/")]
    if not inner:
        return [(metric, run or AXIS_LABELS.get(metric, metric))]
    word = "worker " if all(part.isdecimal() for part in inner) else ""
    return [(f"{metric}/{part}", label(f"{word}{part}")) for part in inner]


def _series(
    curves: Curves, name: str, label: str, color: int, smooth: int, x_of: Callable[[Curves, Steps], Numbers]
) -> Iterator[Series]:
    steps, values = curves.series(name)
    is_sparse = name.startswith("eval/")
    if not np.isfinite(values).any():
        return
    if smooth == 1 and name.partition("@")[0] in ("samples_per_s", "tokens_per_s"):
        smooth = max(len(values) // RATE_WINDOWS, 1)
    if smooth > 1 and not is_sparse and name not in NEVER_SMOOTHED:
        at, original = _thinned(steps, values)
        yield Series("_original", x_of(curves, at), original, color, is_faint=True)
        steps, values = _thinned(steps, moving_mean(values, smooth))
    yield Series(label, x_of(curves, steps), values, color, is_sparse, name=name)


def _thinned(steps: Steps, values: Numbers) -> tuple[Steps, Numbers]:
    curve = Curve()
    curve.add(steps, values)
    return curve.points


def _x_axis(runs: Sequence[Curves], axis: XAxis) -> tuple[str, Callable[[Curves, Steps], Numbers]]:
    """The axis's label, and the function from a run's steps to positions on the axis."""
    label, unit_s = str(axis), 1.0
    if axis == "time":
        longest_s = max(metrics.last("time") or 0.0 for metrics in runs)
        unit_s, unit = next((length_s, unit) for least_s, length_s, unit in _TIME_UNITS if longest_s >= least_s)
        label = f"time of training ({unit})"

    def x_of(metrics: Curves, steps: Steps) -> Numbers:
        if axis == "step":
            return steps.astype(np.float64)
        known_steps, known = metrics.series(axis)
        if not len(known):
            raise CommandError(f"the metrics have no {axis}: choose --x-axis step")
        if axis == "epoch" and np.array_equal(known, np.floor(known)):
            known_steps, known = epoch_starts(known_steps, known)
        return np.interp(steps, known_steps, known / unit_s)

    return label, x_of


def epoch_starts(steps: Steps, epochs: Numbers) -> tuple[Steps, Numbers]:
    """The step before the first of each epoch, and the epoch's index; then the expected end of the last epoch.

    That epoch may be incomplete: it is assumed to be as long as the longest before it.
    """
    firsts = np.flatnonzero(np.diff(epochs, prepend=epochs[0] - 1))
    starts = [0 if epochs[0] == 0 else steps[0], *steps[firsts[1:] - 1]]
    end = starts[-1] + max(steps[-1] - starts[-1], *np.diff(starts), 1)
    return np.array([*starts, end]), np.array([*epochs[firsts], epochs[-1] + 1])
