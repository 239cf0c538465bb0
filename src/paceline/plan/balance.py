"""Dividing a step's micro-batches by measured speed."""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.plan.entries import check_entries
from paceline.plan.shares import shares
from paceline.plan.steady import levels, levels_from_list

# A worker whose best share is nothing gets one micro-batch in as many steps, so that it stays measured.
TURN = 10


class Balancer:
    """Who takes how many of a step's micro-batches, from the times that all workers exchanged in earlier steps.

    A function of the readings alone: workers that observe the same readings divide every step alike. `hints` are
    relative speeds to start with; a worker's first reading replaces its hint. With a `schedule` (after, every), what
    was measured is used first after this many steps and then at intervals of so many.

    `num_steps`: completed steps. `observe` counts one; whoever leaves out a step's readings counts it here.
    """

    def __init__(
        self, num_workers: int, hints: Sequence[float] | None = None, schedule: tuple[int, int] = (1, 1)
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: a world has at least 1 worker")
        self._hints = (1.0,) * num_workers if hints is None else tuple(hints)
        if len(self._hints) != num_workers:
            raise ValueError(f"hints={list(self._hints)} names {len(self._hints)} workers, the world has {num_workers}")
        for rank, hint in enumerate(self._hints):
            if not (isinstance(hint, int | float) and 0 < hint < math.inf):
                raise ValueError(f"the hint {hint!r} of worker {rank} is not a speed: choose a finite number > 0")
        self._times = levels([None] * num_workers)
        self._delays = levels([None] * num_workers)
        self._schedule = schedule
        self._period = -1  # of the schedule, for which these speeds and delays were taken:
        self._used: tuple[Sequence[float], Sequence[float]] = ((), ())
        self.num_steps = 0

    def observe(self, seconds_per_micro_batch: Sequence[float], delays: Sequence[float] | None = None) -> None:
        """The exchanged readings of one step, by rank; 0.0 stands for a worker without a micro-batch in it.

        `delays` are what a step takes of a worker beside its micro-batches, such as its optimizer; 0.0 if unknown.
        """
        self._check(seconds_per_micro_batch)
        if delays is not None:
            self._check(delays)
            self._delays.observe(delays)
        self._times.observe(seconds_per_micro_batch)
        self.num_steps += 1

    def _check(self, readings: Sequence[float]) -> None:
        if len(readings) != len(self._hints):
            raise ValueError(
                f"{len(readings)} readings for {len(self._hints)} workers: give one per worker, 0.0 for none"
            )
        if min(readings) >= 0 and math.isfinite(math.fsum(readings)):
            return
        for rank, seconds in enumerate(readings):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"the reading {seconds} of worker {rank} is not a time: give seconds, 0.0 for none")

    @property
    def speeds(self) -> tuple[float, ...]:
        """Micro-batches per second by which the next step is divided; the hints as long as nobody was measured."""
        speeds = [1 / level if level else 0.0 for level in self._times.values]
        if not all(speeds):
            # Hints are relative: those still in use are put on the scale of the measured workers.
            of_measured = math.fsum(hint for hint, speed in zip(self._hints, speeds, strict=True) if speed)
            scale = math.fsum(speeds) / of_measured if of_measured else 1.0
            speeds = [speed or hint * scale for hint, speed in zip(self._hints, speeds, strict=True)]
        return tuple(speeds)

    def shares(self, num_micro_batches: int) -> tuple[int, ...]:
        """The next step's shares, for any number of micro-batches; asking changes nothing."""
        after, every = self._schedule
        period = max(0, (self.num_steps - after) // every + 1)
        if period != self._period or every == 1:
            self._period = period
            self._used = (self.speeds, self._delays.values) if period else (self._hints, (0.0,) * len(self._hints))
        speeds, delays = self._used
        counts = shares(num_micro_batches, speeds, delays)
        turn, position = divmod(self.num_steps, TURN)
        return _with_idle(counts, speeds, turn) if position == TURN - 1 else counts

    def regrouped(self, previous_ranks: Sequence[int | None]) -> Balancer:
        """The balancer of other workers. previous_ranks: by rank, None for a worker that nothing is known about."""
        usual = math.fsum(self._hints) / len(self._hints)
        balancer = Balancer(
            len(previous_ranks),
            [usual if rank is None else self._hints[rank] for rank in previous_ranks],
            self._schedule,
        )
        balancer.num_steps = self.num_steps
        balancer._times, balancer._delays = (
            levels([None if rank is None else known[rank] for rank in previous_ranks])
            for known in (self._times, self._delays)
        )
        return balancer

    def to_dict(self) -> dict[str, Any]:
        return {
            "hints": list(self._hints),
            "num_steps": self.num_steps,
            "times": self._times.to_list(),
            "delays": self._delays.to_list(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], schedule: tuple[int, int] = (1, 1)) -> Balancer:
        """The balancer that `to_dict` wrote. A missing, unknown or invalid entry is a ValueError that names it."""
        check_entries("the balancer's state", values, ["hints", "num_steps", "times", "delays"])
        hints, num_steps = values["hints"], values["num_steps"]
        if type(num_steps) is not int or num_steps < 0:
            raise ValueError(f"the balancer's num_steps={num_steps!r} is not a count: it must be an integer >= 0")
        for name in ("times", "delays"):
            if not (isinstance(hints, list) and isinstance(values[name], list) and len(values[name]) == len(hints)):
                raise ValueError(
                    f"the balancer's hints={hints!r} and {name}={values[name]!r} are not lists of one entry per worker"
                )
        balancer = cls(len(hints), hints, schedule)
        balancer.num_steps = num_steps
        balancer._times = levels_from_list(values["times"])
        balancer._delays = levels_from_list(values["delays"])
        return balancer


def _with_idle(counts: Sequence[int], speeds: Sequence[float], turn: int = 0) -> tuple[int, ...]:
    """Every idle worker takes one from the worker that would finish last, one that keeps some if there is one.

    Where there are not enough for all idle workers, `turn` decides who comes first.
    """
    idle = [rank for rank, count in enumerate(counts) if count == 0]
    result = list(counts)
    first = turn % len(idle) if idle else 0

    def entry(rank: int) -> tuple[bool, float, int]:
        return result[rank] <= 1, -result[rank] / speeds[rank], rank

    last_first = [entry(rank) for rank, count in enumerate(counts) if count > 0]
    heapq.heapify(last_first)
    for rank in (idle[first:] + idle[:first])[: sum(counts)]:
        last = last_first[0][-1]
        result[last] -= 1
        heapq.heapreplace(last_first, entry(last))
        result[rank] = 1
    return tuple(result)


def hinted_speeds(num_workers: int, slow_rank: int, ratio: float) -> tuple[float, ...]:
    """Relative speeds where every other worker is `ratio` times as fast as `slow_rank`; below 1 counts as 1."""
    if not 0 <= slow_rank < num_workers:
        raise ValueError(
            f"the speed hint's slow_rank={slow_rank} is not in a world of {num_workers}: "
            f"choose 0 <= slow_rank < {num_workers}"
        )
    if not 0 < ratio < math.inf:
        raise ValueError(f"the speed hint's ratio={ratio} is not a ratio of speeds: choose a finite number >= 1")
    if ratio < 1:
        warnings.warn(f"the speed hint's ratio={ratio} counts as 1: slow_rank names the slowest worker", stacklevel=2)
    return tuple(1.0 if rank == slow_rank else max(float(ratio), 1.0) for rank in range(num_workers))
