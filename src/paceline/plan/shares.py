"""Divides a step's micro-batches among the workers: a pure function of their number and the workers' speeds."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

# From this number of workers on, arrays are faster than loops, and floating point is tried before exact arithmetic.
# Relative differences above _SURE are no rounding errors. It gives at most _NEXT of the last micro-batches to one
# worker.
MANY, _SURE, _NEXT = 64, 1e-9, 4

# The micro-batch numbers of a step, by rank.
Plan: TypeAlias = tuple[range, ...]


def shares(num_micro_batches: int, speeds: Sequence[float], delays: Sequence[float] = ()) -> tuple[int, ...]:
    """Micro-batches per worker with the least finishing time max_i(delay_i + share_i / speed_i), over whole numbers.

    Speed 0 means no share; without `delays`, a worker's fixed seconds per step, speeds are relative. Of several best
    divisions it is the one whose second-longest time is least, then the third, and so on; among equal workers the
    lower ranks take the extra ones. Computed in exact arithmetic, so that every worker arrives at the same division.
    """
    return _shares(num_micro_batches, tuple(speeds), tuple(delays))


# Speeds settle, so most calls repeat an earlier one.
@lru_cache(maxsize=256)
def _shares(num_micro_batches: int, speeds: tuple[float, ...], delays: tuple[float, ...]) -> tuple[int, ...]:
    if num_micro_batches < 0:
        raise ValueError(f"num_micro_batches={num_micro_batches} is negative: choose num_micro_batches >= 0")
    if len(speeds) >= MANY and (quick := _quick_shares(num_micro_batches, speeds, delays)):
        return quick
    exact_speeds, speed_unit = _integers("speed", speeds)
    exact_delays, delay_unit = _integers("delay", delays or (0.0,) * len(speeds))
    if not any(exact_speeds):
        raise ValueError(f"speeds {speeds} give no worker a share: choose at least one speed above 0")
    one = speed_unit * delay_unit  # one micro-batch, in units of delay times speed
    # Each worker first takes what it can finish by the time at which all would finish if micro-batches could be
    # divided. Fewer than len(speeds) are then left. Each goes to the worker that would finish it first, ties to the
    # faster worker (the slower one then ends earlier).
    end, end_unit = _divisible_end(num_micro_batches * one, exact_speeds, exact_delays)
    counts = [
        max(0, (end - delay * end_unit) * speed // (end_unit * one))
        for speed, delay in zip(exact_speeds, exact_delays, strict=True)
    ]

    def after_one_more(rank: int) -> tuple[float, _Moment, int, int]:
        speed = exact_speeds[rank]
        moment = _Moment(exact_delays[rank] * speed + (counts[rank] + 1) * one, speed)
        return moment.rounded, moment, -speed, rank

    waiting = [after_one_more(rank) for rank, speed in enumerate(exact_speeds) if speed]
    heapq.heapify(waiting)
    for _ in range(num_micro_batches - sum(counts)):
        rank = waiting[0][-1]
        counts[rank] += 1
        heapq.heapreplace(waiting, after_one_more(rank))
    return tuple(counts)


def _quick_shares(
    num_micro_batches: int, speeds: tuple[float, ...], delays: tuple[float, ...]
) -> tuple[int, ...] | None:
    """The same in floating point, where rounding cannot matter; else None."""
    speed = np.array(speeds)
    delay = np.array(delays or (0.0,) * len(speeds))
    if not (np.isfinite(speed).all() and np.isfinite(delay).all() and (speed > 0).all() and (delay >= 0).all()):
        return None
    by_delay = np.argsort(delay)
    total, head_start = np.cumsum(speed[by_delay]), np.cumsum((delay * speed)[by_delay])
    takes_no_part = delay[by_delay[1:]] * total[:-1] >= num_micro_batches + head_start[:-1]
    last = int(takes_no_part.argmax()) if takes_no_part.any() else -1
    end = (num_micro_batches + head_start[last]) / total[last]
    counts = np.maximum(np.floor((end - delay) * speed * (1 - _SURE) - _SURE), 0.0)
    num_left = num_micro_batches - int(counts.sum())
    moments = delay[:, None] + (counts[:, None] + np.arange(1, _NEXT + 1)) / speed[:, None]
    if not 0 < num_left < moments.size:
        return None
    latest, refused = np.partition(moments.ravel(), (num_left - 1, num_left))[[num_left - 1, num_left]]
    more = (moments <= latest).sum(1)
    if refused - latest < _SURE * refused or (more == _NEXT).any():
        return None
    result: list[int] = (counts + more).astype(np.int64).tolist()
    return tuple(result)


class _Moment:
    """A fraction. It is compared only if the nearest floats are equal, since rounding keeps the order."""

    __slots__ = ("above", "below")

    def __init__(self, above: int, below: int) -> None:
        self.above = above
        self.below = below

    @property
    def rounded(self) -> float:
        try:
            return self.above / self.below
        except OverflowError:
            return math.inf

    def __lt__(self, other: _Moment) -> bool:
        return self.above * other.below < other.above * self.below

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Moment) and self.above * other.below == other.above * self.below

    __hash__ = None  # type: ignore[assignment]


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


def _divisible_end(amount: int, speeds: Sequence[int], delays: Sequence[int]) -> tuple[int, int]:
    """When all would finish if micro-batches could be divided, as a fraction. Workers with longer delays get none."""
    total_speed, head_start = 0, 0
    for delay, speed in sorted((delay, speed) for delay, speed in zip(delays, speeds, strict=True) if speed):
        if total_speed and delay * total_speed >= amount + head_start:
            break
        total_speed += speed
        head_start += delay * speed
    return amount + head_start, total_speed


def _integers(name: str, values: Sequence[float]) -> tuple[list[int], int]:
    """The values as multiples of 1 / unit, and the unit: floats are whole multiples of a power of two."""
    for rank, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} {value} of worker {rank} is not a {name}: choose a finite number >= 0")
    fractions = [value.as_integer_ratio() for value in values]
    unit = max((below for _, below in fractions), default=1)
    return [above * (unit // below) for above, below in fractions], unit
