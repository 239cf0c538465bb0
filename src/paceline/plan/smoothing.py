"""Smoothing a worker's measured times: quickly (El Che), or so that noise moves nothing (the balancer).

Both are values with an `after(reading)`. They use only operations that IEEE 754 rounds correctly, and no logarithm,
so that workers on different machines which are given the same readings reach the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

_T = TypeVar("_T", "Smoothed", "Steady")

# El Che's constants (DESIGN.md §4).
_LEAST_FACTOR, _LARGEST_FACTOR = 0.1, 0.8
_JUMP = 1.5

# The balancer's, chosen by the simulations in tests/plan/test_balance.py. A reading that is three standard deviations
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
class Smoothed:
    """El Che's smoothing: the further off a reading, the faster it is followed; the first one is taken as it is.

    A second reading in a row that is more than 1.5 times off, either way, replaces the value at once.
    """

    value: float
    was_off: bool = False

    def __post_init__(self) -> None:
        _check_time("smoothed value", self.value)
        if not isinstance(self.was_off, bool):
            raise ValueError(f"was_off={self.was_off!r} of a smoothed value is neither true nor false")

    def after(self, reading: float) -> Smoothed:
        _check_time("reading", reading)
        is_off = reading > _JUMP * self.value or self.value > _JUMP * reading
        if is_off and self.was_off:
            return Smoothed(reading)
        difference = reading - self.value
        factor = min(max(abs(difference) / self.value, _LEAST_FACTOR), _LARGEST_FACTOR)
        return Smoothed(self.value + factor * difference, is_off)


@dataclass(frozen=True)
class Steady:
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

    def __post_init__(self) -> None:
        for name in ("level", "mean", "variance"):
            _check_time(name, getattr(self, name))
        for name in ("count", "num_readings"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} of a steady time is not a number of readings: it must be >= 1")
        if not (isinstance(self.covariance, int | float) and math.isfinite(self.covariance)):
            raise ValueError(f"covariance={self.covariance!r} of a steady time is not a finite number")
        if not (isinstance(self.recent, tuple) and 1 <= len(self.recent) <= _SIX):
            raise ValueError(f"recent={self.recent!r} of a steady time are not its last 1 to {_SIX} readings")
        for reading in self.recent:
            _check_time("recent reading", reading)

    @classmethod
    def first(cls, reading: float) -> Steady:
        return cls(level=reading, mean=reading, count=1, recent=(reading,))

    def after(self, reading: float) -> Steady:
        _check_time("reading", reading)
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
        square = min(_deviation(reading, self.recent[-1]) ** 2 / 2, _LARGEST_DIFFERENCE**2 * self.variance)
        variance = max(self.variance + gain * (square - self.variance), _LEAST_NOISE**2)
        if len(self.recent) < _SIX:
            return variance, self.covariance
        bound = _SIGMAS * math.sqrt(variance)
        leaving, following = (_clamp(_deviation(recent, self.level), bound) for recent in self.recent[:2])
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
    return abs(math.fsum(_clamp(_deviation(reading, level) / scale, _SIGMAS) for reading in recent[-window:]))


def _check_time(name: str, value: object) -> None:
    if not (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf):
        raise ValueError(f"{name} {value!r} is not a time: it must be a finite number > 0")


def check_entries(kind: str, values: Mapping[str, Any], names: Sequence[str]) -> None:
    """A missing or unknown entry of what some `to_dict` wrote is a ValueError that names it."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{kind} is {values!r}: it must have {', '.join(names)}")
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"{kind} lacks {', '.join(missing)}: it needs {', '.join(names)}")
    if unknown := [str(key) for key in values if key not in names]:
        raise ValueError(f"{kind} has unknown {', '.join(unknown)}: it takes only {', '.join(names)}")


def to_entries(smoothed: Smoothed | Steady | None) -> dict[str, Any] | None:
    """Plain numbers and lists, for JSON; None stands for a worker without a reading."""
    if smoothed is None:
        return None
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(smoothed).items()}


def from_entries(kind: type[_T], values: Mapping[str, Any] | None) -> _T | None:
    """What `to_entries` wrote. A missing, unknown or invalid entry is a ValueError that names it."""
    if values is None:
        return None
    check_entries(f"a {kind.__name__.lower()} time", values, [field.name for field in fields(kind)])
    fixed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return kind(**fixed)
