"""Verdicts on a run's speed: a slow worker, waiting for data, an expensive exchange, a GPU that waits for its host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from paceline.observe.verdicts import remedies
from paceline.observe.verdicts.evidence import Evidence, Line, WorkerPart, median_of
from paceline.observe.verdicts.verdict import Limits, Verdict

# At most this many slow workers are named.
MAX_NAMED = 3


def slow_workers(evidence: Evidence, limits: Limits) -> Iterator[Verdict]:
    """The workers that need longer per micro-batch than the others, the slowest first.

    The plan gives a slow worker less work, so the others may not wait for it: its time per micro-batch counts.
    """
    lines = evidence.recent
    count = len(lines[-1].workers) if lines else 0
    if count < 2:
        return
    slow = []
    for rank in range(count):
        ratios = [line.ratios[rank] for line in lines]
        # For most of the time, and not in a single line: an occasionally slow worker does not count.
        # Weighted by time, because a worker that becomes slow makes lines longer, and so fewer.
        usual, least = (_quantile(ratios, [line.seconds for line in lines], part) for part in (0.5, 0.25))
        if usual >= limits.slower and least >= limits.slower**0.5 and sorted(ratios)[-2] >= limits.slower:
            slow.append((usual, rank))
    for ratio, rank in sorted(slow, reverse=True)[:MAX_NAMED]:
        if _busy(evidence.parts[rank]) >= limits.busy:
            yield _slow_worker(evidence, lines, rank, ratio, limits)


def _slow_worker(evidence: Evidence, lines: Sequence[Line], rank: int, ratio: float, limits: Limits) -> Verdict:
    num_workers, share = len(evidence.parts), _share(evidence.parts, rank)
    others = [other for other in range(num_workers) if other != rank]
    seconds = [_micro_batch_s(lines, each) for each in range(num_workers)]
    usual_s = median_of([seconds[other] for other in others])
    speed = sum(1 / s for s in seconds if s) * (usual_s or 0.0) / num_workers
    waited = max(evidence.parts[other].waiting or 0.0 for other in others)
    figures = {"slower": ratio, "share": share, "waiting_of_others": waited, "micro_batch_s": seconds[rank] or 0.0}
    since, since_text = _since(evidence, rank, min(ratio**0.5, limits.slower))
    text = f"{evidence.name(rank)} is {ratio:.1f} times slower than the others{since_text}; "
    text += f"it gets {share:.0%} of the work"
    if waited >= limits.waiting:
        text += f", and the others wait for it {waited:.0%} of their time"
    is_reading = _is_slow_by_data(lines, rank, ratio)
    if is_reading:
        figures["data"] = data = evidence.parts[rank].data or 0.0
        text += f"; it waits for data {data:.0%} of its time"
        changes = remedies.slow_reader(evidence, data)
    else:
        changes = remedies.slow_worker(evidence, rank, is_balanced=waited < limits.waiting)
    is_usual = since is None and waited < limits.waiting and not is_reading  # such as a slower model of GPU
    return Verdict(
        "data-bound" if is_reading else "slow worker",
        "info" if is_usual else "warning",
        text,
        rank=rank,
        since_step=since,
        lost=max(1 - speed, 0.0),
        figures=figures,
        changes=changes,
    )


def unbalanced(evidence: Evidence, limits: Limits) -> Iterator[Verdict]:
    """Workers wait for one another although none is slow for long."""
    lines = evidence.recent
    parts = [part.waiting for part in evidence.parts if part.waiting is not None]
    if len(parts) < 2 or fmean(parts) < limits.unbalanced or next(slow_workers(evidence, limits), None):
        return
    part, num_steps = fmean(parts), max(lines[-1].step - lines[0].since_step, 1)
    count = sum(each.micro_batches for each in evidence.parts) / num_steps / len(parts)
    text = f"the workers wait for one another {part:.0%} of the time, though none of them is slow for long; "
    text += f"a step has {count:.3g} micro-batches per worker"
    figures = {"waiting": part, "micro_batches_per_worker": count}
    changes = remedies.unbalanced(evidence)
    yield Verdict("unbalanced", "warning", text, lost=part, figures=figures, changes=changes)


def data_bound(evidence: Evidence, limits: Limits) -> Iterator[Verdict]:
    """All workers wait for data. If only one does, it is a slow worker."""
    parts = [part.data for part in evidence.parts]
    part = median_of(parts)
    if part is None or min(p or 0.0 for p in parts) < limits.data:
        return
    who = "the workers wait" if len(parts) > 1 else "the run waits"
    text = f"{who} for data {part:.0%} of the time"
    changes = remedies.slow_reader(evidence, part)
    yield Verdict("data-bound", "warning", text, lost=part, figures={"data": part}, changes=changes)


def exchange_bound(evidence: Evidence, limits: Limits) -> Iterator[Verdict]:
    parts = [part.exchange for part in evidence.parts]
    part = median_of(parts)
    if len(parts) < 2 or part is None or part < limits.exchange:
        return
    text = f"exchanging gradients takes {part:.0%} of the time"
    changes = remedies.expensive_exchange(evidence, part)
    yield Verdict("exchange-bound", "warning", text, lost=part, figures={"exchange": part}, changes=changes)


def host_bound(evidence: Evidence, limits: Limits) -> Iterator[Verdict]:
    """The least used GPU whose idle time neither data nor the other workers explain."""
    found = []
    for rank, (facts, part) in enumerate(zip(evidence.workers, evidence.parts, strict=False)):
        other = sum(filter(None, (part.data, part.waiting, part.exchange)))
        if facts.gpu is not None and facts.gpu < limits.gpu_percent and other < limits.gpu_other:
            found.append((facts.gpu, rank, other))
    if not found:
        return
    gpu, rank, other = min(found)
    cpu = evidence.facts(rank).cpu
    host = "" if cpu is None else f"; its host process uses {cpu:.0f}% of a core"
    many = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    yield Verdict(
        "host-bound GPU",
        "warning",
        f"the GPU of {evidence.name(rank)}{many} is {gpu:.0f}% busy and waits for Python to queue its kernels{host}",
        rank=rank,
        lost=max(1 - gpu / 100 - other, 0.0),
        figures={"gpu_percent": gpu} | ({} if cpu is None else {"cpu_percent": cpu}),
        changes=remedies.host_bound(evidence),
    )


def _micro_batch_s(lines: Sequence[Line], rank: int) -> float | None:
    return median_of([line.micro_batch_s(rank) for line in lines])


def _quantile(values: Sequence[float], weights: Sequence[float], part: float) -> float:
    """The smallest value that, with all smaller ones, has more than this part of the weight."""
    below, limit = 0.0, part * sum(weights)
    for value, weight in sorted(zip(values, weights, strict=True)):
        below += weight
        if below > limit:
            return value
    return max(values)


def _busy(part: WorkerPart) -> float:
    """The fraction of its time that a worker spends on micro-batches; 1 if it is unknown."""
    return 1.0 if part.computing is None else part.computing + (part.data or 0.0)


def _share(parts: Sequence[WorkerPart], rank: int) -> float:
    total = sum(part.micro_batches for part in parts)
    return parts[rank].micro_batches / total if total else 0.0


def _is_slow_by_data(lines: Sequence[Line], rank: int, ratio: float) -> bool:
    """Whether this worker would be less than half as far behind without waiting for data."""
    own = median_of([line.computing_s(rank) for line in lines])
    others = [median_of([line.computing_s(r) for line in lines]) for r in range(len(lines[-1].workers)) if r != rank]
    usual = median_of(others)
    return own is not None and usual is not None and usual > 0 and own / usual - 1 < (ratio - 1) / 2


def _since(evidence: Evidence, rank: int, level: float) -> tuple[int | None, str]:
    """The first step since which this worker is continuously slower, and in words. None: from the start."""
    lines = [*evidence.timed()][::-1]
    ratios = [line.ratios[rank] for line in lines]
    first = len(lines) - 1
    # Smoothed: a single line is not a change.
    while first > 0 and median(ratios[max(first - 2, 0) : first + 1]) >= level:
        first -= 1
    if first > 0 or ratios[0] < level:
        first = next(i for i in range(first, len(lines)) if ratios[i] >= level or i == len(lines) - 1)
        step = lines[first].since_step
        return step, f" since step {step:,}"
    is_start = evidence.is_whole and len(lines) + 1 == len(evidence.lines)
    return None, " since the start" if is_start else f" since step {lines[0].since_step:,} or earlier"
