"""Verdicts on a run's health: it failed or stalled, a worker left, memory is nearly full, the loss diverges."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import isfinite

from paceline.observe import formats
from paceline.observe.verdicts import remedies
from paceline.observe.verdicts.evidence import Evidence, Line
from paceline.observe.verdicts.verdict import Change, Limits, Verdict

# Losses are compared as medians of this many lines.
_SMOOTH = 5
# The worker that an error is about.
_RANK = re.compile(r"\brank (\d+)\b")
# Matches errors about a loss, a gradient or a ratio of losses.
_DIVERGED = re.compile(r"(loss|norm) is (nan|-?inf)|the run diverges|NonFiniteError", re.IGNORECASE)


def ended(evidence: Evidence, _: Limits) -> Iterator[Verdict]:
    """The run failed, or its process died without a report."""
    reason = evidence.reason or ""
    if evidence.state == "failed" and not _DIVERGED.search(reason):
        advice = Change("", None, "the workers' whole output is in the run's folder, in ranks/")
        found = _RANK.search(reason)
        rank = int(found[1]) if found else None
        yield Verdict("failed", "error", f"the run failed: {reason or 'no reason is known'}", rank, changes=(advice,))
    if evidence.state == "crashed":
        text = "the run's process died without a report"
        advice = Change("", None, "look for the kernel's out-of-memory killer (dmesg); continue with train --resume")
        yield Verdict("failed", "error", text, since_step=_last_step(evidence), changes=(advice,))


def stalled(evidence: Evidence, limits: Limits) -> Iterator[Verdict]:
    """A single worker has stalled, or there was no line of metrics for longer than usual.

    A run on another host that has not written for long is "unknown": it has stalled, or its host is lost.
    """
    if evidence.state not in ("live", "unknown") or evidence.silent_s is None:
        return
    intervals = [line.seconds for line in evidence.lines[-50:] if line.seconds]
    usual_s, step = max(intervals, default=0.0), _last_step(evidence)
    figures = {"no_step_s": evidence.silent_s} | ({"usual_s": usual_s} if usual_s else {})
    known = list(enumerate(evidence.workers[: evidence.num_workers]))
    silent = {rank: w.silent_s for rank, w in known if w.silent_s is not None and w.silent_s >= limits.silent_s}
    since = f"no step for {formats.duration(evidence.silent_s)} after step {step:,}"
    if 0 < len(silent) < len(known):
        rank = max(silent, key=lambda each: silent[each])
        text = f"{evidence.name(rank)} has stalled, its process is stopped or blocked: {since}"
        figures["worker_silent_s"] = silent[rank]
        advice = f"check the process of worker {rank}: it was stopped, swaps, or waits for a disk or a network"
        yield Verdict("stalled", "error", text, rank, step, figures=figures, changes=(Change("", None, advice),))
        return
    is_early = evidence.is_starting or len(intervals) < 2
    enough_s = limits.early_s if is_early else max(limits.stalled_s, limits.stalled_ratio * usual_s)
    if evidence.silent_s < enough_s:
        return
    text = f"{since}; before, the longest time between two lines was {formats.duration(usual_s)}" if usual_s else since
    if silent:
        text = f"{since}: all workers have stalled"
        advice = "check the host: a stopped process, a full disk, no network"
    else:
        advice = "evaluation, a checkpoint or a long step takes time too: `paceline timeline` shows what the workers do"
    changes = (Change("", None, advice),)
    yield Verdict("stalled", "error" if silent else "warning", text, None, step, figures=figures, changes=changes)


def left(evidence: Evidence, _: Limits) -> Iterator[Verdict]:
    """Workers died or left with the newest change of the workers, and none joined."""
    if (event := evidence.newest_change) is None:
        return
    gone, size = event.details.get("left"), event.details.get("size")
    if not isinstance(gone, list) or not gone or not isinstance(size, int) or event.details.get("joined"):
        return
    who = f"worker{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
    reason = str(event.details.get("reason") or "no reason is known")
    others = f"the other {size} continue" if size != 1 else "the other one continues"
    yield Verdict(
        "worker left",
        "error",
        f"{who} left after step {event.step:,} ({reason}); {others}",
        # The others have moved up: a rank that exists is another worker's now.
        rank=gone[0] if isinstance(gone[0], int) and gone[0] >= size else None,
        since_step=event.step,
        lost=len(gone) / max(size + len(gone), 1),
        figures={"left": len(gone), "workers": size},
        changes=(Change("", None, "no step and no sample is lost; the run is slower by this worker's share"),),
    )


def diverging(evidence: Evidence, limits: Limits) -> Iterator[Verdict]:
    lines = [line for line in evidence.lines if line.loss is not None]
    medians = _medians(lines)
    best = min(medians, default=None)
    lowest, at = best if best is not None else (None, 0)
    rate = next((line.lr for line in lines if line.step == at), None) or (lines[0].lr if lines else None)
    changes = remedies.divergence(evidence, rate)
    reason = evidence.reason or ""
    if evidence.state == "failed" and _DIVERGED.search(reason):
        text = f"the loss diverged and the run failed: {reason}"
        yield Verdict("diverging", "error", text, since_step=at or None, changes=changes)
        return
    if not lines:
        return
    last = lines[-1].loss
    assert last is not None
    if not isfinite(last):
        text = f"the loss is {last:g} at step {lines[-1].step:,}"
        yield Verdict("diverging", "error", text, since_step=at or None, changes=changes)
        return
    if lowest is None:
        return
    recent = medians[-1][0]
    first = medians[0][0]
    if evidence.first_loss is not None and isfinite(evidence.first_loss):
        first = max(first, evidence.first_loss)
    is_higher = recent > limits.loss_ratio * lowest if lowest > 0 else recent > first
    if is_higher and recent - lowest >= limits.loss_regained * (first - lowest):
        ratio = f", {recent / lowest:.1f} times its minimum" if lowest > 0 else ""
        text = f"the loss diverges: it is {formats.loss(recent)}{ratio}; it was {formats.loss(lowest)} at step {at:,}"
        figures = {"loss": recent, "lowest": lowest}
        yield Verdict("diverging", "error", text, since_step=at, figures=figures, changes=changes)


def full_memory(evidence: Evidence, limits: Limits) -> Iterator[Verdict]:
    """Of the fullest GPU, and of the first host. Only for a live run: an ended one has freed its memory."""
    if evidence.state != "live":
        return
    gpus = [
        (worker.gpu_memory_bytes / worker.gpu_memory_total_bytes, rank)
        for rank, worker in enumerate(evidence.workers[: evidence.num_workers])
        if worker.gpu_memory_bytes is not None and worker.gpu_memory_total_bytes
    ]
    part, rank = max(gpus, default=(0.0, 0))
    if part >= limits.memory:
        total = evidence.facts(rank).gpu_memory_total_bytes or 0.0
        text = f"the memory of {evidence.name(rank)}'s GPU is {part:.0%} full ({_of(part * total, total)})"
        changes = remedies.full_memory(evidence, is_gpu=True)
        yield Verdict("memory", "warning", text, rank=rank, figures={"used": part}, changes=changes)
    used, total_bytes = evidence.host_memory_bytes, evidence.host_memory_total_bytes
    if used is not None and total_bytes and used / total_bytes >= limits.memory:
        host = evidence.facts(0).host or "the host"
        text = f"the memory of {host} is {used / total_bytes:.0%} full ({_of(used, total_bytes)})"
        changes = remedies.full_memory(evidence, is_gpu=False)
        figures = {"used": used / total_bytes}
        yield Verdict("memory", "warning", text, figures=figures, changes=changes)


def _medians(lines: Sequence[Line]) -> list[tuple[float, int]]:
    """The medians of _SMOOTH consecutive lines (of all, if there are fewer), with the step of the last line."""
    losses = [(line.loss, line.step) for line in lines if line.loss is not None and isfinite(line.loss)]
    if not losses:
        return []
    size = min(_SMOOTH, len(losses))
    values, found = [loss for loss, _ in losses], []
    for end in range(size, len(losses) + 1):
        ordered = sorted(values[end - size : end])  # statistics.median takes several times as long
        found.append(((ordered[(size - 1) // 2] + ordered[size // 2]) / 2, losses[end - 1][1]))
    return found


def _of(used: float, total: float) -> str:
    return f"{used / 1e9:.1f} of {total / 1e9:.1f} GB"


def _last_step(evidence: Evidence) -> int:
    return evidence.lines[-1].step if evidence.lines else 0
