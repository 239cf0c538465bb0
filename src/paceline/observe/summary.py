"""A run in numbers, from the files in its folder: of one that goes on, has ended, or was broken off."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any

import numpy as np

from paceline.observe import formats
from paceline.observe.curves import Curves, read_curves
from paceline.observe.metrics import Metrics, read_newest_metrics
from paceline.observe.run_files import RunFiles, State, Status, last_sign, read_status, state_of

# Of numbers with such names the highest says nothing.
_THE_LOWER_THE_BETTER = ("loss", "perplexity", "error")


@dataclass(frozen=True)
class Reached:
    """How a number went: the newest, and the extremes among those that are finite (NaN if none is)."""

    last: float
    lowest: float
    lowest_step: int
    highest: float
    highest_step: int


@dataclass(frozen=True)
class WorkerTime:
    """Where a worker's time went, as parts from 0 to 1 of all; None where the run did not get to say.

    `share`: its part of the micro-batches."""

    rank: int
    share: float
    waiting: float | None
    computing: float | None = None
    syncing: float | None = None
    rest: float | None = None


@dataclass(frozen=True)
class Summary:
    """Of a run. `evaluation` by name: "eval/loss". Rates are means over the run."""

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
    notes: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class Glance:
    """What a list of many runs shows of each: read from the ends of its files."""

    name: str
    state: State
    started: float | None
    step: int
    total_steps: int | None
    training_s: float | None
    loss: float | None
    samples_per_s: float | None


def glance(files: RunFiles) -> Glance:
    status = read_status(files)
    metrics = read_newest_metrics(files.metrics) if files.metrics.is_file() else Metrics()
    return Glance(
        name=files.root.name,
        state=state_of(files, status),
        started=started_at(files, status),
        step=metrics.last_step,
        total_steps=status.total_steps if status else None,
        training_s=metrics.last("time"),
        loss=metrics.last("loss"),
        samples_per_s=metrics.last("samples_per_s"),
    )


def started_at(files: RunFiles, status: Status | None) -> float | None:
    """Unix time; the age of its files stands in for a run that did not write it down."""
    return status.started if status else last_sign(files) or None


def summarize(files: RunFiles) -> Summary:
    status = read_status(files)
    metrics = read_curves(files.metrics, _is_summed_up) if files.metrics.is_file() else Curves()
    report = _read_report(files)
    names = metrics.names()
    state = state_of(files, status)
    return Summary(
        name=files.root.name,
        folder=str(files.root),
        state=state,
        reason=status.reason if status else None,
        started=started_at(files, status),
        num_starts=status.num_starts if status else 1,
        training_s=metrics.last("time") or 0.0,
        step=metrics.last_step,
        total_steps=status.total_steps if status else None,
        epoch=metrics.last("epoch"),
        train_loss=_reached(metrics, "loss"),
        evaluation={
            name: reached
            for name in names
            if name.startswith("eval/") and (reached := _reached(metrics, name)) is not None
        },
        samples_per_s=metrics.mean("samples_per_s"),
        tokens_per_s=metrics.mean("tokens_per_s"),
        efficiency=report.get("efficiency"),
        workers=_reported_workers(report) or _observed_workers(metrics),
        num_checkpoints=_count_checkpoints(files),
        plots=sorted(str(path) for path in files.plots.glob("*.*")),
        num_unreadable_lines=metrics.num_unreadable,
        notes=tuple(_notes(files, state, metrics)),
    )


def text(summary: Summary) -> str:
    """The block that ends a run, and that `paceline logs summary` shows."""
    rows: list[tuple[str, str]] = [("run", summary.name), ("state", _state(summary))]
    if summary.started is not None:
        times = "" if summary.num_starts == 1 else f", started {summary.num_starts} times"
        rows.append(("started", f"{formats.moment(summary.started)}{times}"))
    rows.append(("steps", _steps(summary)))
    if summary.train_loss is not None:
        rows.append(("loss", _reached_text("loss", summary.train_loss)))
    rows += [(name, _reached_text(name, reached)) for name, reached in summary.evaluation.items()]
    if throughput := _throughput(summary):
        rows.append(("throughput", throughput))
    rows += [(f"worker {worker.rank}", _worker_text(worker)) for worker in summary.workers]
    if summary.num_checkpoints:
        rows.append(("checkpoints", f"{summary.num_checkpoints} in {summary.folder}/checkpoints"))
    rows += [("plot", path) for path in summary.plots]
    rows.append(("folder", summary.folder))
    rows += [("note", note) for note in summary.notes]
    rows = [(formats.one_line(name), formats.one_line(value)) for name, value in rows]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _is_summed_up(name: str) -> bool:
    return name in ("loss", "time", "epoch", "samples_per_s", "tokens_per_s") or name.startswith("eval/")


def _reached(metrics: Curves, name: str) -> Reached | None:
    steps, values = metrics.series(name)
    if not len(values):
        return None
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite):
        return Reached(float(values[-1]), math.nan, int(steps[-1]), math.nan, int(steps[-1]))
    lowest = finite[np.argmin(values[finite])]
    highest = finite[np.argmax(values[finite])]
    return Reached(
        last=float(values[-1]),
        lowest=float(values[lowest]),
        lowest_step=int(steps[lowest]),
        highest=float(values[highest]),
        highest_step=int(steps[highest]),
    )


def _read_report(files: RunFiles) -> dict[str, Any]:
    """As `Report` of a run has it; empty if the run did not get to write it, or wrote something else."""
    if not files.report.is_file():
        return {}
    try:
        report = json.loads(files.report.read_bytes())
        _ = [_times(worker) for worker in report["workers"]], float(report["efficiency"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return dict(report)


def _times(worker: Mapping[str, Any]) -> list[float]:
    return [float(worker[name]) for name in ("share", "compute_s", "waiting_s", "sync_s", "rest_s")]


def _reported_workers(report: Mapping[str, Any]) -> list[WorkerTime]:
    workers = []
    for rank, worker in enumerate(report.get("workers", ())):
        share, *times = _times(worker)
        whole = sum(times) or 1.0
        computing, waiting, syncing, rest = (part / whole for part in times)
        workers.append(WorkerTime(rank, share, waiting, computing, syncing, rest))
    return workers


def _observed_workers(metrics: Curves) -> list[WorkerTime]:
    """From the lines: what a run that goes on, or was broken off, has told so far."""
    if metrics.num_workers is None:
        return []
    shares, waited, num_told = metrics.workers[metrics.num_workers]  # of the lines with as many workers as now
    whole = float(shares.sum()) or 1.0
    return [
        WorkerTime(rank, float(share) / whole, float(waited[rank]) / num_told if num_told else None)
        for rank, share in enumerate(shares)
    ]


def _count_checkpoints(files: RunFiles) -> int:
    return sum(1 for path in files.checkpoints.glob("step-*") if path.is_dir())


def _notes(files: RunFiles, state: State, metrics: Curves) -> list[str]:
    notes = []
    if not files.metrics.is_file():
        notes.append("there is no metrics.jsonl yet" if state == "live" else "there is no metrics.jsonl")
    elif not metrics.num_lines:
        notes.append("metrics.jsonl has no step yet" if state == "live" else "metrics.jsonl has no step")
    if metrics.num_unreadable:
        notes.append(f"left out, since they cannot be read: {metrics.num_unreadable} lines of metrics.jsonl")
    if state == "unknown" and files.status.is_file():
        notes.append(f"the run's host cannot be asked; its last sign was {_ago(files)} ago")
    return notes


def _ago(files: RunFiles) -> str:
    return formats.duration(max(0.0, time() - last_sign(files)))


def _state(summary: Summary) -> str:
    return summary.state if summary.reason is None else f"{summary.state} ({summary.reason})"


def _steps(summary: Summary) -> str:
    total = "" if summary.total_steps is None else f" of {summary.total_steps}"
    return f"{summary.step}{total} in {formats.duration(summary.training_s)}"


def _reached_text(name: str, reached: Reached) -> str:
    extremes = f"lowest {formats.loss(reached.lowest)} at step {reached.lowest_step}"
    if not any(word in name.lower() for word in _THE_LOWER_THE_BETTER):
        extremes += f", highest {formats.loss(reached.highest)} at step {reached.highest_step}"
    return f"{formats.loss(reached.last)}, {extremes}"


def _throughput(summary: Summary) -> str:
    parts = []
    if summary.samples_per_s is not None:
        parts.append(f"{formats.rate(summary.samples_per_s)} samples/s")
    if summary.tokens_per_s is not None:
        parts.append(f"{formats.rate(summary.tokens_per_s)} tokens/s")
    if summary.efficiency is not None:
        parts.append(f"{summary.efficiency:.0%} of the sum of the workers' speeds")
    return ", ".join(parts)


def _worker_text(worker: WorkerTime) -> str:
    shown = {
        "computing": worker.computing,
        "waiting": worker.waiting,
        "exchange": worker.syncing,
        "rest": worker.rest,
    }
    parts = [f"{name} {part:.0%}" for name, part in shown.items() if part is not None]
    return ", ".join([f"{worker.share:.0%} of the work", *parts])
