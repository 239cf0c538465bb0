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

# The balancer's. A deviation of three standard deviations is not noise; a single reading never counts for more.
_SIGMAS = 3.0
# Two readings that are each that far off, or six that are together: two follow a large change at once, six find one of
# some 20% at 10% noise within as many steps. More windows, or a lower limit, would mostly find noise.
_JUMP_WINDOW, _WINDOW = 2, 6
_WINDOW_LIMIT = _SIGMAS * math.sqrt(_WINDOW)
# When six readings speak, some of them may be from before the change: the later half is not.
_FRESH = 3
# Noise is learned over 256 readings (half of that makes the limits waver), from a guess worth 8 readings of 10% noise,
# and never believed to be below 1%, so that differences too small to matter change nothing.
_NOISE_MEMORY, _GUESS_WEIGHT, _GUESS, _LEAST_NOISE = 256, 8, 0.1, 0.01
# One difference raises the estimate of the noise by at most this many standard deviations: a change is not noise.
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
    """The level of noisy readings: it stays put until they contradict it, and then moves at once.

    `level` is brought up to the mean of the readings since the last change whenever the two are further apart than
    that mean's standard error, so it settles and then rests. It has changed when the last two readings are each three
    standard deviations off, or the last six together: then the mean starts again from the last two or three. The
    noise is estimated from the readings themselves: `variance` from successive differences, relative to the readings,
    and `covariance` of neighbours, since noise that lasts for several readings moves a mean further than noise that
    does not.
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
                raise ValueError(f"{name}={value!r} of a steady level is not a count of readings: it must be >= 1")
        if not (isinstance(self.covariance, int | float) and math.isfinite(self.covariance)):
            raise ValueError(f"covariance={self.covariance!r} of a steady level is not a finite number")
        if not 1 <= len(self.recent) <= _WINDOW:
            raise ValueError(f"{len(self.recent)} recent readings of a steady level: it keeps 1 to {_WINDOW}")
        for reading in self.recent:
            _check_time("recent reading", reading)

    @classmethod
    def first(cls, reading: float) -> Steady:
        return cls(level=reading, mean=reading, count=1, recent=(reading,))

    def after(self, reading: float) -> Steady:
        _check_time("reading", reading)
        variance, covariance = self._noise(reading)
        # The variance of a mean of neighbours that are correlated by r is (1 + r) / (1 - r) times as large.
        lasting = max(covariance, 0.0)
        sigma = math.sqrt((variance + lasting) * (variance + 2 * lasting) / variance)
        recent = (*self.recent, reading)[-_WINDOW:]
        count = self.count + 1
        bound = _SIGMAS * sigma * self.mean
        mean = self.mean + _clamp(reading - self.mean, bound) / count
        level = mean if abs(mean - self.level) > sigma * self.level / math.sqrt(count) else self.level
        if _contradiction(recent, _JUMP_WINDOW, level, sigma, count) >= _SIGMAS * _JUMP_WINDOW:
            count = _JUMP_WINDOW
            level = mean = math.fsum(recent[-count:]) / count
        elif _contradiction(recent, _WINDOW, level, sigma, count) >= _WINDOW_LIMIT:
            count = _FRESH
            level = mean = math.fsum(recent[-count:]) / count
        return Steady(level, mean, count, recent, variance, covariance, self.num_readings + 1)

    def _noise(self, reading: float) -> tuple[float, float]:
        last = self.recent[-1]
        gain = 1 / min(self.num_readings + _GUESS_WEIGHT, _NOISE_MEMORY)
        largest = _LARGEST_DIFFERENCE**2 * self.variance
        square = min(_deviation(reading, last) ** 2 / 2, largest)
        variance = max(self.variance + gain * (square - self.variance), _LEAST_NOISE**2)
        bound = _SIGMAS * math.sqrt(variance)
        product = _clamp(_deviation(reading, self.level), bound) * _clamp(_deviation(last, self.level), bound)
        return variance, self.covariance + gain * (product - self.covariance)


def _deviation(reading: float, level: float) -> float:
    """How far off a reading is, relatively and the same in both directions: close to log(reading / level)."""
    return math.sqrt(reading / level) - math.sqrt(level / reading)


def _clamp(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


def _contradiction(recent: Sequence[float], window: int, level: float, sigma: float, count: int) -> float:
    """By how many standard deviations in all the last readings are off a level that rests on `count` others."""
    if count <= window:
        return 0.0
    scale = sigma * math.sqrt(1 + window / count)
    return abs(math.fsum(_clamp(_deviation(reading, level) / scale, _SIGMAS) for reading in recent[-window:]))


def _check_time(name: str, value: object) -> None:
    if not (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf):
        raise ValueError(f"{name} {value!r} is not a time: it must be a finite number > 0")


def check_entries(kind: str, values: Mapping[str, Any], names: Sequence[str]) -> None:
    """A missing or unknown entry of what some `to_dict` wrote is a ValueError that names it."""
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
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
