"""Dividing a step's micro-batches by measured speed.

Only operations that IEEE 754 rounds correctly are used, and no logarithm, so workers on different machines compute the
same bits from the same readings.
"""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.plan.entries import Estimate, check_entries, check_time, from_entries, to_entries
from paceline.plan.shares import MANY, shares

# A worker whose best share is zero gets one micro-batch every TURN steps, so that it is still measured.
TURN = 10

# Chosen by the simulations in tests/plan/test_balance.py. A reading that is three standard deviations
# off is probably not noise; a single one counts for no more than that.
SIGMAS = 3.0
# Two consecutive readings that are each that far off detect a large change; six that are this many standard deviations
# off in total detect one of 20% in 10% noise. With a limit of 7.5 the shares of three workers fluctuate, with 8.0 such
# changes are missed more often.
TWO, TWO_LIMIT = 2, 2 * SIGMAS
SIX, SIX_LIMIT = 6, 7.75
# If six readings show a change, the older ones may be from before it: the mean restarts from the later half.
_HALF = 3
# Noise is estimated over 256 readings (with half as many, changes of 20% are missed more often), starting from a guess
# of 10% with the weight of 8 readings. It is at least 1%. A difference of more than five standard deviations is a
# change rather than noise, and counts as five.
NOISE_MEMORY, GUESS_WEIGHT, _GUESS, LEAST_NOISE = 256, 8, 0.1, 0.01
LARGEST_DIFFERENCE = 5.0


@dataclass(frozen=True)
class Steady(Estimate):
    """The level of noisy readings: constant until the readings contradict it, then it moves immediately.

    `level` is set to the mean of the readings since the last change whenever they differ by more than the mean's
    standard error, so its moves become rarer and smaller. A change is two consecutive readings that are each three
    standard deviations off, or six that are off in total; then the mean restarts from the latest readings. The first
    reading counts only until the second: a worker's first step allocates, connects and compiles.

    The noise is estimated relative to the readings: `variance` from successive differences, and the `covariance` of
    neighbours, since noise that lasts longer than a reading moves a mean further. `recent`: at most six readings, which
    may still show a change; the covariance is estimated from readings that leave it.
    """

    level: float
    mean: float
    count: int
    recent: tuple[float, ...]
    variance: float = _GUESS**2
    covariance: float = 0.0
    num_readings: int = 1

    def check(self) -> None:
        for name in ("level", "mean", "variance"):
            check_time(name, getattr(self, name))
        for name in ("count", "num_readings"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} of a steady time is not a number of readings: it must be >= 1")
        if not (isinstance(self.covariance, int | float) and math.isfinite(self.covariance)):
            raise ValueError(f"covariance={self.covariance!r} of a steady time is not a finite number")
        if not (isinstance(self.recent, tuple) and 1 <= len(self.recent) <= SIX):
            raise ValueError(f"recent={self.recent!r} of a steady time are not its last 1 to {SIX} readings")
        for reading in self.recent:
            check_time("recent reading", reading)

    @classmethod
    def first(cls, reading: float) -> Steady:
        return cls(level=reading, mean=reading, count=1, recent=(reading,))

    def after(self, reading: float) -> Steady:
        if self.num_readings == 1:
            return Steady(reading, reading, 1, (reading,), num_readings=2)
        variance, covariance = self._noise(reading)
        # The mean of neighbours that are correlated by r varies (1 + r) / (1 - r) times as much.
        lasting = max(covariance, 0.0)
        sigma = math.sqrt((variance + lasting) * (variance + 2 * lasting) / variance)
        count = self.count + 1
        mean = self.mean + _clamp(reading - self.mean, SIGMAS * sigma * self.mean) / count
        level = mean if abs(mean - self.level) > sigma * self.level / math.sqrt(count) else self.level
        recent = (*self.recent, reading)[-SIX:]
        if _contradiction(recent, TWO, level, sigma, count) >= TWO_LIMIT:
            count = TWO
        elif _contradiction(recent, SIX, level, sigma, count) >= SIX_LIMIT:
            count = _HALF
        else:
            return Steady(level, mean, count, recent, variance, covariance, self.num_readings + 1)
        recent = recent[-count:]
        mean = math.fsum(recent) / count
        return Steady(mean, mean, count, recent, variance, covariance, self.num_readings + 1)

    def _noise(self, reading: float) -> tuple[float, float]:
        """Variance and covariance with this reading."""
        gain = 1 / min(self.num_readings + GUESS_WEIGHT, NOISE_MEMORY)
        difference = _deviation(reading, self.recent[-1])
        square = min(difference * difference / 2, LARGEST_DIFFERENCE**2 * self.variance)
        variance = max(self.variance + gain * (square - self.variance), LEAST_NOISE**2)
        if len(self.recent) < SIX:
            return variance, self.covariance
        bound = SIGMAS * math.sqrt(variance)
        leaving = _clamp(_deviation(self.recent[0], self.level), bound)
        following = _clamp(_deviation(self.recent[1], self.level), bound)
        return variance, self.covariance + gain * (leaving * following - self.covariance)


def _deviation(reading: float, level: float) -> float:
    """The relative deviation of a reading, symmetric in both directions: close to log(reading / level)."""
    return math.sqrt(reading / level) - math.sqrt(level / reading)


def _clamp(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


def _contradiction(recent: Sequence[float], window: int, level: float, sigma: float, count: int) -> float:
    """The total deviation of the last readings from a level of `count` readings, in standard deviations."""
    if count <= window or len(recent) < window:
        return 0.0
    scale = sigma * math.sqrt(1 + window / count)
    deviations = []
    for reading in recent[-window:]:
        deviations.append(_clamp(_deviation(reading, level) / scale, SIGMAS))
    return abs(math.fsum(deviations))


class Levels:
    """The steady times of workers, by rank; None without a reading. values: their levels; 0.0 without a reading."""

    def __init__(self, times: Sequence[Steady | None]) -> None:
        self._times = list(times)
        self.values = [time.level if time else 0.0 for time in times]

    def __len__(self) -> int:
        return len(self._times)

    def __getitem__(self, rank: int) -> Steady | None:
        return self._times[rank]

    def observe(self, readings: Sequence[float]) -> None:
        """readings: one per worker, 0.0 for none."""
        if len(readings) != len(self._times):
            refuse(readings, len(self))
        times, values = self._times.copy(), self.values.copy()
        for rank, seconds in enumerate(readings):
            if not 0 <= seconds < math.inf:
                refuse(readings, len(self))
            if seconds:
                time = times[rank]
                times[rank] = after = Steady.first(seconds) if time is None else time.after(seconds)
                values[rank] = after.level
        self._times, self.values = times, values

    def to_list(self) -> list[dict[str, Any] | None]:
        return [to_entries(self[rank]) for rank in range(len(self))]


def refuse(readings: Sequence[float], num_workers: int) -> NoReturn:
    """Raise a ValueError for invalid readings."""
    if len(readings) != num_workers:
        raise ValueError(f"{len(readings)} readings for {num_workers} workers: give one per worker, 0.0 for none")
    rank, seconds = next((rank, each) for rank, each in enumerate(readings) if not 0 <= each < math.inf)
    raise ValueError(f"the reading {seconds} of worker {rank} is not a time: give seconds, 0.0 for none")


def levels(times: Sequence[Steady | None]) -> Levels:
    if len(times) < MANY:
        return Levels(times)
    from paceline.plan.many_levels import ManyLevels

    return ManyLevels(times)


class Balancer:
    """Divides a step's micro-batches by the times that all workers exchanged in earlier steps.

    A function of the readings alone: workers that observe the same readings divide every step alike. `hints` are
    initial relative speeds; a worker's first reading replaces its hint. With a `schedule` (after, every), measured
    times are first used after `after` steps and then updated every `every` steps.

    `num_steps`: completed steps. `observe` increments it; a caller that skips a step's readings must increment it.
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

        `delays`: each worker's seconds per step outside its micro-batches, such as the optimizer's; 0.0 if unknown.
        """
        self._times.observe(seconds_per_micro_batch)
        if delays is not None:
            self._delays.observe(delays)
        self.num_steps += 1

    @property
    def speeds(self) -> tuple[float, ...]:
        """Micro-batches per second by which the next step is divided; the hints until a worker is measured."""
        speeds = []
        for level in self._times.values:
            speeds.append(1 / level if level else 0.0)
        if not all(speeds):
            # Hints are relative: those still in use are put on the scale of the measured workers.
            of_measured = math.fsum(hint for hint, speed in zip(self._hints, speeds, strict=True) if speed)
            scale = math.fsum(speeds) / of_measured if of_measured else 1.0
            speeds = [speed or hint * scale for hint, speed in zip(self._hints, speeds, strict=True)]
        return tuple(speeds)

    def shares(self, num_micro_batches: int) -> tuple[int, ...]:
        """The next step's shares, for any number of micro-batches. Has no side effects."""
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
        """The balancer of a changed world. previous_ranks: by new rank, None for a worker that has joined."""
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
        balancer._times, balancer._delays = (
            levels([from_entries(Steady, entry) for entry in values[name]]) for name in ("times", "delays")
        )
        return balancer


def _with_idle(counts: Sequence[int], speeds: Sequence[float], turn: int = 0) -> tuple[int, ...]:
    """Give each idle worker a micro-batch of the worker that would finish last, if possible of one that has several.

    If there are not enough for all idle workers, `turn` decides which come first.
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
