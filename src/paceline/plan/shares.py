"""Who takes how many of a step's micro-batches: a pure function of their number and the workers' speeds."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

# The micro-batch numbers of a step, by rank.
Plan: TypeAlias = tuple[range, ...]


def shares(num_micro_batches: int, speeds: Sequence[float], delays: Sequence[float] = ()) -> tuple[int, ...]:
    """Micro-batches per worker with the least finishing time max_i(delay_i + share_i / speed_i), over whole numbers.

    Speed 0 means no share; without `delays`, a worker's fixed seconds per step, speeds are relative. Of several best
    divisions it is the one whose second-longest time is least, then the third, and so on; among equal workers the
    lower ranks take the extra ones. Computed in exact arithmetic, so that every worker arrives at the same division.
    """
    return _shares(num_micro_batches, tuple(speeds), tuple(delays))


# Speeds settle, so most steps ask what was asked before.
@lru_cache(maxsize=256)
def _shares(num_micro_batches: int, speeds: tuple[float, ...], delays: tuple[float, ...]) -> tuple[int, ...]:
    if num_micro_batches < 0:
        raise ValueError(f"num_micro_batches={num_micro_batches} is negative: choose num_micro_batches >= 0")
    exact_speeds = _exact("speed", speeds)
    exact_delays = _exact("delay", delays or (0.0,) * len(speeds))
    if not any(exact_speeds):
        raise ValueError(f"speeds {speeds} give nobody a share: choose at least one speed above 0")
    # Whoever can finish one more by the time at which all would finish if micro-batches could be divided, takes it:
    # only fewer than len(speeds) are then left to give out, each to the worker who would finish it first, ties to the
    # faster worker (the slower one then ends earlier).
    end = _divisible_end(num_micro_batches, exact_speeds, exact_delays)
    counts = [
        max(0, math.floor((end - delay) * speed)) for speed, delay in zip(exact_speeds, exact_delays, strict=True)
    ]
    waiting = [
        (delay + (count + 1) / speed, -speed, rank)
        for rank, (count, speed, delay) in enumerate(zip(counts, exact_speeds, exact_delays, strict=True))
        if speed
    ]
    heapq.heapify(waiting)
    for _ in range(num_micro_batches - sum(counts)):
        time, negative_speed, rank = waiting[0]
        counts[rank] += 1
        heapq.heapreplace(waiting, (time - 1 / negative_speed, negative_speed, rank))
    return tuple(counts)


def ranges(counts: Sequence[int]) -> Plan:
    """Consecutive micro-batch numbers per worker, in rank order: (3, 0, 2) gives 0..2, none, 3..4."""
    return _ranges(tuple(counts))


@lru_cache(maxsize=256)
def _ranges(counts: tuple[int, ...]) -> Plan:
    if any(count < 0 for count in counts):
        raise ValueError(f"shares {counts} contain a negative one: choose shares >= 0")
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))


def sizes(plan: Plan) -> tuple[int, ...]:
    """How many micro-batches each worker takes, by rank."""
    return tuple(map(len, plan))


def owner(plan: Plan, number: int) -> int:
    """The rank whose micro-batch this is."""
    return next(rank for rank, numbers in enumerate(plan) if number in numbers)


def _divisible_end(num_micro_batches: int, speeds: Sequence[Fraction], delays: Sequence[Fraction]) -> Fraction:
    """When all would finish if micro-batches could be divided; who is delayed beyond it takes no part."""
    total_speed, head_start, end = Fraction(0), Fraction(0), None
    for delay, speed in sorted((delay, speed) for delay, speed in zip(delays, speeds, strict=True) if speed):
        if end is not None and delay >= end:
            break
        total_speed += speed
        head_start += delay * speed
        end = (num_micro_batches + head_start) / total_speed
    assert end is not None
    return end


def _exact(name: str, values: Sequence[float]) -> list[Fraction]:
    for rank, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} {value} of worker {rank} is not a {name}: choose a finite number >= 0")
    return [Fraction(value) for value in values]
