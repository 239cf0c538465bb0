"""A run in numbers, from the files in its folder: live, ended or killed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import time

import numpy as np

from paceline.observe import formats
from paceline.observe.metrics import Curves, read_curves
from paceline.observe.run_files import RunFiles, State, Status, last_sign, read_json, read_status, state_of

_READ = ("loss", "time", "epoch", "samples_per_s", "tokens_per_s")
# The maximum is not shown for metrics whose names contain one of these.
_LOWER_IS_BETTER = ("loss", "perplexity", "error")
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
    are those of the last line of metrics.
    """

    rank: int
    total_s: float
    seconds: Mapping[str, float]
    share: float

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
    notes: Sequence[str] = ()


def started_at(files: RunFiles, status: Status | None) -> float | None:
    """Unix time; without a status, when the run last wrote a file."""
    return status.started if status else last_sign(files) or None


def summarize(files: RunFiles, *, tail: bool = False) -> Summary:
    """tail: read only the end of the metrics, for a list of many runs. Rates are then those of the last step."""
    status = read_status(files)
    metrics = Curves()
    if files.metrics.is_file():
        metrics = read_curves(files.metrics, lambda name: name in _READ or name.startswith("eval/"), tail=tail)
    rate = metrics.last if tail else metrics.mean
    efficiency, workers = _read_report(files)
    state = state_of(files, status)
    training_s = metrics.last("time") or 0.0
    reached = {name: found for name in metrics.names() if (found := _reached(metrics, name)) is not None}
    return Summary(
        name=files.root.name,
        folder=str(files.root),
        state=state,
        reason=status.reason if status else None,
        started=started_at(files, status),
        num_starts=status.num_starts if status else 1,
        training_s=training_s,
        step=metrics.last_step,
        total_steps=status.total_steps if status else None,
        epoch=metrics.last("epoch"),
        train_loss=reached.get("loss"),
        evaluation={name: found for name, found in reached.items() if name.startswith("eval/")},
        samples_per_s=rate("samples_per_s"),
        tokens_per_s=rate("tokens_per_s"),
        efficiency=efficiency,
        workers=workers
        or [
            WorkerTime(rank, training_s, {"wait": waiting * training_s}, share / (sum(metrics.shares) or 1.0))
            for rank, (share, waiting) in enumerate(zip(metrics.shares, metrics.waiting, strict=False))
        ],
        num_checkpoints=sum(path.is_dir() for path in files.checkpoints.glob("step-*")),
        plots=sorted(str(path) for path in files.plots.glob("*.*")),
        num_unreadable_lines=metrics.num_unreadable,
        notes=_notes(files, state, metrics),
    )


def text(summary: Summary) -> str:
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
    rows += [(f"worker {worker.rank}", _worker_text(worker)) for worker in summary.workers]
    if summary.num_checkpoints:
        rows.append(("checkpoints", f"{summary.num_checkpoints} in {summary.folder}/checkpoints"))
    rows += [("plot", path) for path in summary.plots]
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


def _notes(files: RunFiles, state: State, metrics: Curves) -> list[str]:
    notes = []
    yet = " yet" if state == "live" else ""
    if not files.metrics.is_file():
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
    if not any(word in name.lower() for word in _LOWER_IS_BETTER):
        extremes += f", highest {formats.loss(reached.highest)} at step {reached.highest_step}"
    return f"{formats.loss(reached.last)}, {extremes}"


def _worker_text(worker: WorkerTime) -> str:
    parts = [f"{label} {worker.part(kind):.0%}" for kind, label in _KIND_LABELS.items() if kind in worker.seconds]
    return ", ".join([f"{worker.share:.0%} of the work", *parts])
