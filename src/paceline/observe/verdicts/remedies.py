"""What to change: settings of a project file, with values computed from measurements."""

from __future__ import annotations

from math import ceil
from typing import Any

from paceline.observe.json_lines import is_count, is_number
from paceline.observe.verdicts.evidence import Evidence
from paceline.observe.verdicts.verdict import Change

# The fraction of the time that an exchange should take at most.
EXCHANGE_TARGET = 0.1
_RATES = ("trainer.learning_rate", "optimizer.arguments.lr")
# Divisors are found by trying them: of a larger batch, the largest one up to this number.
MAX_TRIED = 1 << 16
# A step with this many micro-batches per worker can be divided by speed to a few percent.
MICRO_BATCHES_PER_WORKER = 8


def slow_worker(evidence: Evidence, rank: int, *, is_balanced: bool) -> tuple[Change, ...]:
    """is_balanced: the others do not wait for it."""
    host = evidence.facts(rank).host
    where = f" on {host}" if host else ""
    if is_balanced:
        why = (
            f"the plan already gives it less work; look for other processes, heat or a power limit{where}, or train "
            "without it if its work is not worth its part in the exchange"
        )
        return (Change("", None, why),)
    why = f"the plan follows a change within a few steps; if this persists, look for other processes{where}"
    return _better_divided(evidence) or (Change("", None, why),)


def unbalanced(evidence: Evidence) -> tuple[Change, ...]:
    why = "the workers' speeds vary from step to step: look for other processes on their hosts"
    return _better_divided(evidence) or (Change("", None, why),)


def _better_divided(evidence: Evidence) -> tuple[Change, ...]:
    """Settings that keep the plan from following the workers' speeds."""
    if (shares := evidence.settings.get("trainer.shares")) not in (None, "measured"):
        return (Change("trainer.shares", "measured", f"the work is divided by {shares!r}, not by measured speed"),)
    global_batch = _count(evidence, "trainer.global_batch")
    micro_batch = _count(evidence, "trainer.micro_batch") or global_batch
    wanted = evidence.num_workers * MICRO_BATCHES_PER_WORKER
    if micro_batch * wanted > global_batch and (smaller := _divisor(global_batch, global_batch // wanted)):
        why = f"a step has {global_batch / micro_batch:.0f} micro-batches, too few to divide by speed; this makes "
        return (Change("trainer.micro_batch", smaller, f"{why}{global_batch // smaller}"),)
    return ()


def slow_reader(evidence: Evidence, part: float) -> tuple[Change, ...]:
    """part: the fraction of the time spent waiting for data."""
    readers = _count(evidence, "trainer.readers")
    # Each process reads while the worker computes, so the number needed is reading time over computing time.
    part = min(part, 0.95)
    needed = max(ceil(max(readers, 1) * part / (1 - part)), 1) + readers
    limit = evidence.cores and max(evidence.cores // max(evidence.num_workers, 1), 1)
    changes = []
    if limit is None or readers < limit:
        count = min(needed, limit or needed)
        changes.append(Change("trainer.readers", count, f"processes per worker that read ahead, now {readers}"))
    if limit is not None and needed > limit:
        why = f"{needed} readers per worker would be needed, but the host has {evidence.cores} cores: prepare the data "
        changes.append(Change("", None, why + "once, before training (docs/data.md)"))
    return tuple(changes)


def expensive_exchange(evidence: Evidence, part: float) -> tuple[Change, ...]:
    """part: the fraction of the time that the exchange takes."""
    changes = []
    if evidence.settings.get("trainer.overlap") is False:
        changes.append(Change("trainer.overlap", True, "exchange gradients during the backward pass"))
    if global_batch := _count(evidence, "trainer.global_batch"):
        # One exchange per step: with `factor` times the work per step it is `factor` times less frequent.
        part = min(part, 0.95)
        factor = part / (1 - part) * (1 - EXCHANGE_TARGET) / EXCHANGE_TARGET
        larger = global_batch * (1 << max(ceil(factor) - 1, 1).bit_length())
        why = f"one exchange for more samples, about {EXCHANGE_TARGET:.0%} of the time; changes the result"
        changes.append(Change("trainer.global_batch", larger, why))
    if evidence.settings.get("trainer.strategy.kind", "gradients") == "gradients":
        why = "exchanges so rarely that its cost stays below a target; changes the result"
        changes.append(Change("trainer.strategy", "{kind: cadence}", why))
    return tuple(changes)


def host_bound(evidence: Evidence) -> tuple[Change, ...]:
    changes = []
    if evidence.settings.get("trainer.compile") is False:
        changes.append(Change("trainer.compile", True, "fewer and larger kernels"))
    if evidence.settings.get("trainer.capture") == "off":
        changes.append(Change("trainer.capture", "auto", "replay steps as CUDA graphs"))
    micro_batch, global_batch = _count(evidence, "trainer.micro_batch"), _count(evidence, "trainer.global_batch")
    if micro_batch and global_batch and global_batch % (2 * micro_batch) == 0:
        changes.append(Change("trainer.micro_batch", 2 * micro_batch, "more work per kernel"))
    return tuple(changes) or (Change("", None, "give the GPU more work per kernel: a larger micro-batch or model"),)


def full_memory(evidence: Evidence, *, is_gpu: bool) -> tuple[Change, ...]:
    if not is_gpu:
        readers = _count(evidence, "trainer.readers")
        if readers > 1:
            return (Change("trainer.readers", readers // 2, f"each reading process has its own memory, now {readers}"),)
        return (Change("", None, "use fewer workers per host, or read data from files instead of holding it"),)
    changes = []
    micro_batch = _count(evidence, "trainer.micro_batch") or _count(evidence, "trainer.global_batch")
    if smaller := _divisor(micro_batch, micro_batch // 2):
        changes.append(Change("trainer.micro_batch", smaller, "less memory for activations, the same result"))
    if evidence.settings.get("trainer.gradient_checkpointing") is False:
        why = "recomputes activations; for models that support it"
        changes.append(Change("trainer.gradient_checkpointing", True, why))
    return tuple(changes)


def divergence(evidence: Evidence, rate: float | None) -> tuple[Change, ...]:
    """rate: the learning rate when the loss was lowest."""
    changes = []
    name = next((name for name in _RATES if is_number(evidence.settings.get(name))), None)
    rate = rate if name is None else float(evidence.settings[name])
    if rate:
        lower, why = float(f"{rate / 3:.2g}"), f"a third of {rate:g}"
        changes.append(
            Change(name, lower, why) if name else Change("", None, f"lower the learning rate: {lower:g}, {why}")
        )
    if evidence.settings.get("trainer.max_grad_norm") is None:
        changes.append(Change("trainer.max_grad_norm", 1.0, "clips gradients; none are clipped now"))
    if not _count(evidence, "trainer.warmup_steps"):
        changes.append(Change("trainer.warmup_steps", 100, "begins with a small learning rate"))
    return tuple(changes)


def _count(evidence: Evidence, name: str) -> int:
    """An integer setting; 0 if it is not given."""
    value: Any = evidence.settings.get(name)
    return value if is_count(value) else 0


def _divisor(count: int, most: int) -> int:
    """The largest divisor of `count` up to `most`; 0 without one."""
    return next((size for size in range(min(most, MAX_TRIED), 0, -1) if count % size == 0), 0)
