"""The levels of many workers' noisy readings, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from paceline.plan.balance import (
    GUESS_WEIGHT,
    LARGEST_DIFFERENCE,
    LEAST_NOISE,
    NOISE_MEMORY,
    SIGMAS,
    SIX,
    SIX_LIMIT,
    TWO,
    TWO_LIMIT,
    Levels,
    Steady,
    refuse,
)


class ManyLevels(Levels):
    """`Levels` as arrays, bitwise equal. Unusual cases are computed by `Steady`."""

    def __init__(self, times: Sequence[Steady | None]) -> None:
        num = len(times)
        self._numbers = {each.name: np.zeros(num) for each in fields(Steady) if each.name != "recent"}
        self._recent = np.zeros((num, SIX))  # the latest is the last; num_recent of them are readings
        self._num_recent = np.zeros(num, dtype=np.int64)
        for rank, time in enumerate(times):
            if time is not None:
                self._set(rank, time)
        self.values = self._numbers["level"].tolist()

    def __len__(self) -> int:
        return len(self._num_recent)

    def __getitem__(self, rank: int) -> Steady | None:
        if not self._num_recent[rank]:
            return None
        values = {name: value[rank].item() for name, value in self._numbers.items()}
        recent = tuple(self._recent[rank, SIX - self._num_recent[rank] :].tolist())
        return Steady(**values | {name: int(values[name]) for name in ("count", "num_readings")}, recent=recent)

    def _set(self, rank: int, time: Steady) -> None:
        for name, value in self._numbers.items():
            value[rank] = getattr(time, name)
        self._num_recent[rank] = num = len(time.recent)
        self._recent[rank, SIX - num :] = time.recent

    def observe(self, readings: Sequence[float]) -> None:
        reading = np.array(readings, dtype=np.float64)
        if len(reading) != len(self) or not (np.isfinite(reading) & (reading >= 0)).all():
            refuse(readings, len(self))
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
        self._num_recent[usual] = np.minimum(self._num_recent[usual] + 1, SIX)
        for rank, time in times:
            seconds = float(readings[rank])
            self._set(rank, Steady.first(seconds) if time is None else time.after(seconds))
        self.values = self._numbers["level"].tolist()

    def _after(self, ranks: np.ndarray, reading: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """`Steady.after` for these ranks where nothing changes, and where something may change."""
        before = {name: values[ranks] for name, values in self._numbers.items()}
        num_recent, old = self._num_recent[ranks], self._recent[ranks]
        gain = 1 / np.minimum(before["num_readings"] + GUESS_WEIGHT, NOISE_MEMORY)
        difference = _deviations(reading, old[:, -1])
        square = np.minimum(difference * difference / 2, LARGEST_DIFFERENCE**2 * before["variance"])
        variance = np.maximum(before["variance"] + gain * (square - before["variance"]), LEAST_NOISE**2)
        has_six = num_recent == SIX
        bound = SIGMAS * np.sqrt(variance)
        leaving, following = (
            _clamped(_deviations(np.where(has_six, old[:, number], 1.0), before["level"]), bound) for number in (0, 1)
        )
        covariance = before["covariance"]
        covariance = np.where(has_six, covariance + gain * (leaving * following - covariance), covariance)
        lasting = np.maximum(covariance, 0.0)
        sigma = np.sqrt((variance + lasting) * (variance + 2 * lasting) / variance)
        count, mean, level = before["count"] + 1, before["mean"], before["level"]
        mean = mean + _clamped(reading - mean, SIGMAS * sigma * mean) / count
        level = np.where(np.abs(mean - level) > sigma * level / np.sqrt(count), mean, level)
        is_change = np.zeros(len(ranks), dtype=bool)
        off = _deviations(np.where(old > 0, old, 1.0), level[:, None]), _deviations(reading, level)
        for window, limit in ((TWO, TWO_LIMIT), (SIX, SIX_LIMIT)):
            scale = sigma * np.sqrt(1 + window / count)
            total = _clamped(off[1] / scale, SIGMAS)
            for number in range(1, window):
                total = total + _clamped(off[0][:, -number] / scale, SIGMAS)
            # This sum is rounded differently from `Steady`'s, which therefore decides close cases.
            is_change |= (count > window) & (num_recent + 1 >= window) & (np.abs(total) > limit - 1e-9)
        after = {"level": level, "mean": mean, "count": count, "variance": variance, "covariance": covariance}
        return after | {"num_readings": before["num_readings"] + 1}, is_change


def _deviations(reading: np.ndarray, level: np.ndarray) -> np.ndarray:
    deviations: np.ndarray = np.sqrt(reading / level) - np.sqrt(level / reading)
    return deviations


def _clamped(value: np.ndarray, bound: np.ndarray | float) -> np.ndarray:
    clamped: np.ndarray = np.minimum(np.maximum(value, -bound), bound)
    return clamped
