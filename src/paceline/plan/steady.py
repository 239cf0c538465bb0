"""The level of each worker's noisy readings.

Only operations that IEEE 754 rounds correctly are used, and no logarithm, so that workers on different machines which
are given the same readings reach the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from paceline.plan.entries import Estimate, check_time, from_entries, to_entries

# From this number of workers on, their levels are arrays: for fewer, NumPy's calls take longer than Python.
MANY = 64

# Chosen by the simulations in tests/plan/test_balance.py. A reading that is three standard deviations
# off is probably not noise; a single one counts for no more than that.
_SIGMAS = 3.0
# Two readings in a row that are each that far off follow a large change at once; six that are this many standard
# deviations off in all find one of 20% in 10% noise. With a limit of 7.5 three workers' shares flutter, with 8.0 such
# changes are missed more often.
_TWO, _TWO_LIMIT = 2, 2 * _SIGMAS
_SIX, _SIX_LIMIT = 6, 7.75
# When six readings speak, the older ones may be from before the change: the mean starts again from the later half.
_HALF = 3
# Noise is learned over 256 readings (from half as many, changes of 20% are missed more often), beginning with a guess
# of 10% that is worth 8 readings. Below 1% it does not matter. A difference of more than five standard deviations is a
# change rather than noise, and raises the estimate no further.
_NOISE_MEMORY, _GUESS_WEIGHT, _GUESS, _LEAST_NOISE = 256, 8, 0.1, 0.01
_LARGEST_DIFFERENCE = 5.0


@dataclass(frozen=True)
class Steady(Estimate):
    """The level of noisy readings: it rests until they contradict it, and then moves at once.

    `level` is set to the mean of the readings since the last change whenever the two are further apart than that
    mean's standard error, so it settles in ever rarer and smaller moves. A change is two readings in a row that are
    each three standard deviations off, or six that are off in all; then the mean starts again from the latest. The very
    first reading counts until there is a second: a worker's first step allocates, connects and compiles.

    The noise is estimated from the readings, relative to them: `variance` from successive differences, and the
    `covariance` of neighbours, since noise that outlasts a reading moves a mean further. `recent` are the readings, at
    most six, that are not yet known to be no change; the covariance is learned from those that leave.
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
        if not (isinstance(self.recent, tuple) and 1 <= len(self.recent) <= _SIX):
            raise ValueError(f"recent={self.recent!r} of a steady time are not its last 1 to {_SIX} readings")
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
        mean = self.mean + _clamp(reading - self.mean, _SIGMAS * sigma * self.mean) / count
        level = mean if abs(mean - self.level) > sigma * self.level / math.sqrt(count) else self.level
        recent = (*self.recent, reading)[-_SIX:]
        if _contradiction(recent, _TWO, level, sigma, count) >= _TWO_LIMIT:
            count = _TWO
        elif _contradiction(recent, _SIX, level, sigma, count) >= _SIX_LIMIT:
            count = _HALF
        else:
            return Steady(level, mean, count, recent, variance, covariance, self.num_readings + 1)
        recent = recent[-count:]
        mean = math.fsum(recent) / count
        return Steady(mean, mean, count, recent, variance, covariance, self.num_readings + 1)

    def _noise(self, reading: float) -> tuple[float, float]:
        """Variance and covariance with this reading."""
        gain = 1 / min(self.num_readings + _GUESS_WEIGHT, _NOISE_MEMORY)
        difference = _deviation(reading, self.recent[-1])
        square = min(difference * difference / 2, _LARGEST_DIFFERENCE**2 * self.variance)
        variance = max(self.variance + gain * (square - self.variance), _LEAST_NOISE**2)
        if len(self.recent) < _SIX:
            return variance, self.covariance
        bound = _SIGMAS * math.sqrt(variance)
        leaving = _clamp(_deviation(self.recent[0], self.level), bound)
        following = _clamp(_deviation(self.recent[1], self.level), bound)
        return variance, self.covariance + gain * (leaving * following - self.covariance)


def _deviation(reading: float, level: float) -> float:
    """How far off a reading is, relatively and the same in both directions: close to log(reading / level)."""
    return math.sqrt(reading / level) - math.sqrt(level / reading)


def _clamp(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


def _contradiction(recent: Sequence[float], window: int, level: float, sigma: float, count: int) -> float:
    """By how many standard deviations in all the last readings are off a level that rests on `count` readings."""
    if count <= window or len(recent) < window:
        return 0.0
    scale = sigma * math.sqrt(1 + window / count)
    deviations = []
    for reading in recent[-window:]:
        deviations.append(_clamp(_deviation(reading, level) / scale, _SIGMAS))
    return abs(math.fsum(deviations))


class Levels:
    """The steady times of some workers, by rank; None for a worker without a reading."""

    def __init__(self, times: Sequence[Steady | None]) -> None:
        self._times = list(times)

    def __len__(self) -> int:
        return len(self._times)

    def __getitem__(self, rank: int) -> Steady | None:
        return self._times[rank]

    @property
    def values(self) -> list[float]:
        """0.0 for a worker without a reading."""
        return [time.level if time else 0.0 for time in self._times]

    def observe(self, readings: Sequence[float]) -> None:
        """readings: one per worker, 0.0 for none."""
        for rank, reading in enumerate(readings):
            if reading:
                time = self._times[rank]
                self._times[rank] = Steady.first(reading) if time is None else time.after(reading)

    def to_list(self) -> list[dict[str, Any] | None]:
        return [to_entries(self[rank]) for rank in range(len(self))]


class ManyLevels(Levels):
    """The same, to the bit, as arrays. Whatever is not the usual case is computed by `Steady`."""

    def __init__(self, times: Sequence[Steady | None]) -> None:
        num = len(times)
        self._numbers = {each.name: np.zeros(num) for each in fields(Steady) if each.name != "recent"}
        self._recent = np.zeros((num, _SIX))  # the latest is the last; num_recent of them are readings
        self._num_recent = np.zeros(num, dtype=np.int64)
        for rank, time in enumerate(times):
            if time is not None:
                self._set(rank, time)

    def __len__(self) -> int:
        return len(self._num_recent)

    def __getitem__(self, rank: int) -> Steady | None:
        if not self._num_recent[rank]:
            return None
        values = {name: value[rank].item() for name, value in self._numbers.items()}
        recent = tuple(self._recent[rank, _SIX - self._num_recent[rank] :].tolist())
        return Steady(**values | {name: int(values[name]) for name in ("count", "num_readings")}, recent=recent)

    def _set(self, rank: int, time: Steady) -> None:
        for name, value in self._numbers.items():
            value[rank] = getattr(time, name)
        self._num_recent[rank] = num = len(time.recent)
        self._recent[rank, _SIX - num :] = time.recent

    @property
    def values(self) -> list[float]:
        levels: list[float] = self._numbers["level"].tolist()
        return levels

    def observe(self, readings: Sequence[float]) -> None:
        reading = np.array(readings, dtype=np.float64)
        if not reading.any():
            return
        usual = np.flatnonzero((reading > 0) & (self._numbers["num_readings"] > 1))
        after, is_change = self._after(usual, reading[usual])
        others = [*np.flatnonzero((reading > 0) & (self._numbers["num_readings"] < 2)), *usual[is_change]]
        times = [(rank, self[rank]) for rank in map(int, others)]
        for name, values in after.items():
            self._numbers[name][usual] = values
        self._recent[usual, :-1] = self._recent[usual, 1:]
        self._recent[usual, -1] = reading[usual]
        self._num_recent[usual] = np.minimum(self._num_recent[usual] + 1, _SIX)
        for rank, time in times:
            seconds = float(readings[rank])
            self._set(rank, Steady.first(seconds) if time is None else time.after(seconds))

    def _after(self, ranks: np.ndarray, reading: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """`Steady.after` for these ranks where nothing changes, and where something may change."""
        before = {name: values[ranks] for name, values in self._numbers.items()}
        num_recent, old = self._num_recent[ranks], self._recent[ranks]
        gain = 1 / np.minimum(before["num_readings"] + _GUESS_WEIGHT, _NOISE_MEMORY)
        difference = _deviations(reading, old[:, -1])
        square = np.minimum(difference * difference / 2, _LARGEST_DIFFERENCE**2 * before["variance"])
        variance = np.maximum(before["variance"] + gain * (square - before["variance"]), _LEAST_NOISE**2)
        has_six = num_recent == _SIX
        bound = _SIGMAS * np.sqrt(variance)
        leaving, following = (
            _clamped(_deviations(np.where(has_six, old[:, number], 1.0), before["level"]), bound) for number in (0, 1)
        )
        covariance = before["covariance"]
        covariance = np.where(has_six, covariance + gain * (leaving * following - covariance), covariance)
        lasting = np.maximum(covariance, 0.0)
        sigma = np.sqrt((variance + lasting) * (variance + 2 * lasting) / variance)
        count, mean, level = before["count"] + 1, before["mean"], before["level"]
        mean = mean + _clamped(reading - mean, _SIGMAS * sigma * mean) / count
        level = np.where(np.abs(mean - level) > sigma * level / np.sqrt(count), mean, level)
        is_change = np.zeros(len(ranks), dtype=bool)
        off = _deviations(np.where(old > 0, old, 1.0), level[:, None]), _deviations(reading, level)
        for window, limit in ((_TWO, _TWO_LIMIT), (_SIX, _SIX_LIMIT)):
            scale = sigma * np.sqrt(1 + window / count)
            total = _clamped(off[1] / scale, _SIGMAS)
            for number in range(1, window):
                total = total + _clamped(off[0][:, -number] / scale, _SIGMAS)
            # This sum is rounded otherwise than `Steady`'s: what is close is left to it.
            is_change |= (count > window) & (num_recent + 1 >= window) & (np.abs(total) > limit - 1e-9)
        after = {"level": level, "mean": mean, "count": count, "variance": variance, "covariance": covariance}
        return after | {"num_readings": before["num_readings"] + 1}, is_change


def levels(times: Sequence[Steady | None]) -> Levels:
    return ManyLevels(times) if len(times) >= MANY else Levels(times)


def levels_from_list(values: Sequence[dict[str, Any] | None]) -> Levels:
    """What `to_list` wrote. A missing, unknown or invalid entry is a ValueError that names it."""
    return levels([from_entries(Steady, value) for value in values])


def _deviations(reading: np.ndarray, level: np.ndarray) -> np.ndarray:
    deviations: np.ndarray = np.sqrt(reading / level) - np.sqrt(level / reading)
    return deviations


def _clamped(value: np.ndarray, bound: np.ndarray | float) -> np.ndarray:
    clamped: np.ndarray = np.minimum(np.maximum(value, -bound), bound)
    return clamped
