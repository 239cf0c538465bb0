"""A run in numbers, from the files in its folder: live, ended or killed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import time
from typing import Any

import numpy as np

from paceline.observe import formats
from paceline.observe.events import describe_changes, read_world_changes
from paceline.observe.json_lines import is_count
from paceline.observe.metrics import SAMPLES, Curves, mean_samples_per_s, read_curves
from paceline.observe.run_files import RunFiles, State, last_sign, read_json, read_mapping, read_status, state_of

_READ = ("loss", "time", "epoch", SAMPLES, "samples_per_s", "tokens_per_s", "eval")
# The maximum is not shown for metrics whose names contain one of these.
LOWER_IS_BETTER = ("loss", "perplexity", "error")
_KIND_LABELS = {"compute": "computing", "wait": "waiting", "sync": "exchange", "other": "rest"}


@dataclass(frozen=True)
class Reached:
    """The last value of a metric, and its finite extremes (NaN without a finite value)."""

    last: float
    lowest: float
    lowest_step: int
    highest: float
    highest_step: int


@dataclass(frozen=True)
class WorkerTime:
    """seconds: by kind, such as "compute", "wait" (for slower workers), "sync" (exchange) and "other".

    Kinds that were not measured are missing. share: the worker's fraction of the micro-batches. Without a report, both
    are from the last line of metrics. peak_bytes: the most memory that it used, of its GPU if it has one.
    """

    rank: int
    total_s: float
    seconds: Mapping[str, float]
    share: float
    peak_bytes: int | None = None

    def part(self, kind: str) -> float:
        """The fraction of the time spent on a kind, 0 to 1."""
        return self.seconds[kind] / self.total_s if self.total_s else 0.0


@dataclass(frozen=True)
class Summary:
    """Of a run. `evaluation`: by name, such as "eval/loss". Rates are means over the run."""

    name: str
    folder: str
    state: State
    reason: str | None
    started: float | None
    num_starts: int
    training_s: float
    step: int
    total_steps: int | None
    epoch: float | None
    train_loss: Reached | None
    evaluation: Mapping[str, Reached]
    samples_per_s: float | None
    tokens_per_s: float | None
    efficiency: float | None
    workers: Sequence[WorkerTime]
    num_checkpoints: int
    plots: Sequence[str]
    num_unreadable_lines: int
    changes: str | None  # workers that left and joined
    notes: Sequence[str] = ()


def summarize(files: RunFiles, *, tail: bool = False) -> Summary:
    """tail: read only the end of the metrics, for a list of many runs. Extremes are then of the end only."""
    status = read_status(files)
    metrics, samples_per_s, problem = Curves(), None, None
    try:
        if files.metrics.is_file():
            metrics = read_curves(files.metrics, _READ, tail=tail)
            samples_per_s = mean_samples_per_s(files.metrics, metrics)
    except OSError as error:  # the run of another user
        problem = f"metrics.jsonl cannot be read: {error.strerror}"
    efficiency, workers = _read_report(files)
    state = state_of(files, status)
    training_s = metrics.last("time") or 0.0
    reached = {name: found for name in metrics.names() if (found := _reached(metrics, name)) is not None}
    return Summary(
        name=files.root.name,
        folder=str(files.root),
        state=state,
        reason=status.reason if status else None,
        started=status.started if status else last_sign(files) or None,
        num_starts=status.num_starts if status else 1,
        training_s=training_s,
        step=max(metrics.last_step, _status_step(files)),
        total_steps=status.total_steps if status else None,
        epoch=metrics.last("epoch"),
        train_loss=reached.get("loss"),
        evaluation={name: found for name, found in reached.items() if name.startswith("eval/")},
        samples_per_s=samples_per_s,
        tokens_per_s=_tokens_per_s(metrics, samples_per_s),
        efficiency=efficiency,
        workers=_with_peaks(files, workers or _workers_of(metrics, training_s)),
        num_checkpoints=sum(path.is_dir() for path in files.checkpoints.glob("step-*")),
        plots=sorted(str(path) for path in files.plots.glob("*.*")),
        num_unreadable_lines=metrics.num_unreadable,
        changes=None if tail or not (changes := read_world_changes(files)) else describe_changes(changes),
        notes=_notes(files, state, metrics, problem),
    )


def _workers_of(metrics: Curves, training_s: float) -> list[WorkerTime]:
    """From the last line of metrics, while there is no report."""
    return [
        WorkerTime(rank, training_s, {"wait": waiting * training_s}, share / (sum(metrics.shares) or 1.0))
        for rank, (share, waiting) in enumerate(zip(metrics.shares, metrics.waiting, strict=False))
    ]


def _tokens_per_s(metrics: Curves, samples_per_s: float | None) -> float | None:
    """Over the run, as `samples_per_s` is. The mean of the lines' rates would count fast times too much."""
    tokens, samples = metrics.mean("tokens_per_s"), metrics.mean("samples_per_s")
    return samples_per_s * (tokens / samples) if samples_per_s and tokens and samples else tokens


def _status_step(files: RunFiles) -> int:
    """The last step in worker 0's status, which may be later than the last one that was logged."""
    step: Any = read_mapping(files.worker(0)).get("step")
    return step if is_count(step) else 0


def _with_peaks(files: RunFiles, workers: Sequence[WorkerTime]) -> list[WorkerTime]:
    """With the most memory that each worker used, from its status."""
    peaks = [(worker, read_mapping(files.worker(worker.rank)).get("peak_bytes")) for worker in workers]
    return [replace(worker, peak_bytes=peak if is_count(peak) else None) for worker, peak in peaks]


@dataclass(frozen=True)
class Comparison:
    """A run beside a baseline. efficiency: the speed-up per worker; 1 if twice the workers are twice as fast."""

    baseline: str
    speed_up: float
    efficiency: float


def compare(run: Summary, baseline: Summary) -> Comparison | None:
    """By samples per second; None if one of them has none."""
    if run.samples_per_s is None or not baseline.samples_per_s:
        return None
    speed_up = run.samples_per_s / baseline.samples_per_s
    return Comparison(baseline.name, speed_up, speed_up * (len(baseline.workers) or 1) / (len(run.workers) or 1))


def text(summary: Summary, comparison: Comparison | None = None) -> str:
    """The block printed at the end of a run and by `paceline logs summary`."""
    reason = "" if summary.reason is None else f" ({summary.reason})"
    rows = [("run", summary.name), ("state", f"{summary.state}{reason}")]
    if summary.started is not None:
        starts = "" if summary.num_starts == 1 else f", started {summary.num_starts} times"
        rows.append(("started", f"{formats.moment(summary.started)}{starts}"))
    total = "" if summary.total_steps is None else f" of {summary.total_steps}"
    rows.append(("steps", f"{summary.step}{total} in {formats.duration(summary.training_s)}"))
    if summary.train_loss is not None:
        rows.append(("loss", _reached_text("loss", summary.train_loss)))
    rows += [(name, _reached_text(name, reached)) for name, reached in summary.evaluation.items()]
    rates = [] if summary.samples_per_s is None else [f"{formats.rate(summary.samples_per_s)} samples/s"]
    rates += [] if summary.tokens_per_s is None else [f"{formats.rate(summary.tokens_per_s)} tokens/s"]
    rates += [] if summary.efficiency is None else [f"{summary.efficiency:.0%} of the sum of the workers' speeds"]
    rows += [("throughput", ", ".join(rates))] if rates else []
    if comparison is not None:
        per_worker = f"{comparison.efficiency:.0%} per worker"
        rows.append(("speed-up", f"{comparison.speed_up:.2f} times {comparison.baseline}, {per_worker}"))
    rows += [] if summary.changes is None else [("workers", summary.changes)]
    for worker in summary.workers:
        parts = [f"{label} {worker.part(kind):.0%}" for kind, label in _KIND_LABELS.items() if kind in worker.seconds]
        rows.append((f"worker {worker.rank}", ", ".join([f"{worker.share:.0%} of work", *parts])))
    if peaks := [formats.size(worker.peak_bytes) for worker in summary.workers if worker.peak_bytes is not None]:
        rows.append(("memory", f"peak {', '.join(peaks)}"))
    if summary.num_checkpoints:
        rows.append(("checkpoints", f"{summary.num_checkpoints} in {summary.folder}/checkpoints"))
    rows += [("plot", path) for path in summary.plots]
    rows += [("metrics", f"{summary.folder}/metrics.jsonl"), ("output", f"{summary.folder}/ranks")]
    rows.append(("folder", summary.folder))
    rows += [("note", note) for note in summary.notes]
    rows = [(formats.one_line(name), formats.one_line(value)) for name, value in rows]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _reached(metrics: Curves, name: str) -> Reached | None:
    steps, values = metrics.series(name)
    if not len(values):
        return None
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite):
        return Reached(float(values[-1]), math.nan, int(steps[-1]), math.nan, int(steps[-1]))
    low, high = finite[np.argmin(values[finite])], finite[np.argmax(values[finite])]
    return Reached(float(values[-1]), float(values[low]), int(steps[low]), float(values[high]), int(steps[high]))


def _read_report(files: RunFiles) -> tuple[float | None, list[WorkerTime]]:
    """Efficiency and workers from report.json; nothing if it is missing or malformed."""
    report = read_json(files.report)
    workers = []
    try:
        for rank, worker in enumerate(report["workers"]):
            times = [float(worker[name]) for name in ("compute_s", "waiting_s", "sync_s", "rest_s")]
            seconds = dict(zip(_KIND_LABELS, times, strict=True))
            workers.append(WorkerTime(rank, sum(times), seconds, float(worker["share"])))
        return float(report["efficiency"]), workers
    except (ValueError, KeyError, TypeError):
        return None, []


def _notes(files: RunFiles, state: State, metrics: Curves, problem: str | None) -> list[str]:
    notes = []
    yet = " yet" if state == "live" else ""
    if problem is not None:
        notes.append(problem)
    elif not files.metrics.is_file():
        notes.append(f"there is no metrics.jsonl{yet}")
    elif not metrics.num_lines:
        notes.append(f"metrics.jsonl has no step{yet}")
    if metrics.num_unreadable:
        notes.append(f"skipped {metrics.num_unreadable} unreadable lines of metrics.jsonl")
    if state == "unknown" and files.status.is_file():
        silent_s = max(0.0, time() - last_sign(files))
        notes.append(f"the run's host cannot be queried; its files last changed {formats.duration(silent_s)} ago")
    return notes


def _reached_text(name: str, reached: Reached) -> str:
    extremes = f"lowest {formats.loss(reached.lowest)} at step {reached.lowest_step}"
    if not any(word in name.lower() for word in LOWER_IS_BETTER):
        extremes += f", highest {formats.loss(reached.highest)} at step {reached.highest_step}"
    return f"{formats.loss(reached.last)}, {extremes}"
