"""Who takes how many of a step's micro-batches: a pure function of their number and the workers' speeds."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

# The micro-batch numbers of a step, by rank.
Plan: TypeAlias = tuple[range, ...]


def shares(num_micro_batches: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Micro-batches per worker with the least finishing time max_i(share_i / speed_i), over whole numbers.

    Speeds are relative; speed 0 means no share. Of several best divisions it is the one whose second-longest time is
    least, then the third, and so on; among workers of equal speed the lower ranks take the extra ones. Computed in
    exact arithmetic, so that every worker arrives at the same division.
    """
    if num_micro_batches < 0:
        raise ValueError(f"num_micro_batches={num_micro_batches} is negative: choose num_micro_batches >= 0")
    scaled = _as_integers(speeds)
    # Nobody's share is below its proportional one rounded down, so only fewer than len(speeds) are left to give out:
    # each to the worker who would finish it first, ties to the faster worker (the slower one then ends earlier).
    total = sum(scaled)
    counts = [num_micro_batches * speed // total for speed in scaled]
    # Times as integers: different fractions with denominators below 2**bits are more than 2**-precision apart, so
    # that they stay different, and in order, when rounded down to multiples of it.
    precision = 2 * max(scaled).bit_length()
    waiting = [
        (((count + 1) << precision) // speed, -speed, rank)
        for rank, (count, speed) in enumerate(zip(counts, scaled, strict=True))
        if speed
    ]
    heapq.heapify(waiting)
    for _ in range(num_micro_batches - sum(counts)):
        _, negative_speed, rank = waiting[0]
        counts[rank] += 1
        time = ((counts[rank] + 1) << precision) // -negative_speed
        heapq.heapreplace(waiting, (time, negative_speed, rank))
    return tuple(counts)


def ranges(counts: Sequence[int]) -> Plan:
    """Consecutive micro-batch numbers per worker, in rank order: (3, 0, 2) gives 0..2, none, 3..4."""
    if any(count < 0 for count in counts):
        raise ValueError(f"shares {tuple(counts)} contain a negative one: choose shares >= 0")
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))


@lru_cache(maxsize=256)
def plan(num_micro_batches: int, speeds: tuple[float, ...]) -> Plan:
    """The micro-batch numbers of each worker, for these speeds."""
    return ranges(shares(num_micro_batches, speeds))


def owner(plan: Plan, number: int) -> int:
    """The rank whose micro-batch this is."""
    return next(rank for rank, numbers in enumerate(plan) if number in numbers)


def _as_integers(speeds: Sequence[float]) -> list[int]:
    """Whole numbers in exactly the proportion of the speeds."""
    for rank, speed in enumerate(speeds):
        if not (math.isfinite(speed) and speed >= 0):
            raise ValueError(f"speed {speed} of worker {rank} is not a speed: choose a finite number >= 0")
    if not any(speeds):
        raise ValueError(f"speeds {tuple(speeds)} give nobody a share: choose at least one speed above 0")
    ratios = [float(speed).as_integer_ratio() for speed in speeds]
    # Denominators are powers of two: the largest is a multiple of all.
    common = max(denominator for _, denominator in ratios)
    return [numerator * (common // denominator) for numerator, denominator in ratios]
