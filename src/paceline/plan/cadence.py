"""El Che: how many batches each worker runs between syncs, so that syncs cost little and no worker waits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

from paceline.core.settings import setting
from paceline.plan.balance import hinted_speeds
from paceline.plan.entries import Estimate, check_entries, check_time, from_entries, to_entries
from paceline.plan.shares import shares

_LEAST_TARGET, _LARGEST_TARGET = 0.01, 0.5
# Counts change only if one would change by more than this fraction.
_DEAD_BAND = 0.1
# The largest ratio of the workers' mean speed to the slowest; beyond it syncs become more frequent.
_LARGEST_RATIO = 4

# The range of the weight of a reading, and the ratio from which a reading is off.
_LEAST_FACTOR, _LARGEST_FACTOR = 0.1, 0.8
_JUMP = 1.5


@dataclass(frozen=True)
class Smoothed(Estimate):
    """El Che's smoothing: the further a reading is from the value, the larger its weight. The first is the value.

    The second reading in a row that is off by more than a factor of 1.5, in either direction, replaces the value.
    """

    value: float
    was_off: bool = False

    def check(self) -> None:
        check_time("smoothed value", self.value)
        if not isinstance(self.was_off, bool):
            raise ValueError(f"was_off={self.was_off!r} of a smoothed value is neither true nor false")

    def after(self, reading: float) -> Smoothed:
        is_off = reading > _JUMP * self.value or self.value > _JUMP * reading
        if is_off and self.was_off:
            return Smoothed(reading)
        difference = reading - self.value
        factor = min(max(abs(difference) / self.value, _LEAST_FACTOR), _LARGEST_FACTOR)
        return Smoothed(self.value + factor * difference, is_off)


@dataclass(frozen=True)
class Cadence:
    """El Che's settings, for any number of workers; see `ElChe`. With max_anchor=anchor the anchor is fixed."""

    anchor: int = setting("initial number of micro-batches of the slowest worker between exchanges", 10, least=1)
    overhead_target: float = setting("cost of an exchange, as a fraction of compute time", 0.1, least=0.01, most=0.5)
    max_anchor: int = setting("largest number of micro-batches between exchanges", 200, least=1)
    max_batch_diff: int | None = setting("largest lead of a worker's count over the slowest one's", None, least=1)
    speed_hint: tuple[int, float] | None = setting("which worker is slow, used until speeds are measured", None)

    def __post_init__(self) -> None:
        self.for_workers(1 if self.speed_hint is None else self.speed_hint[0] + 1)

    def for_workers(self, num_workers: int) -> ElChe:
        return ElChe(num_workers, **{each.name: getattr(self, each.name) for each in fields(Cadence)})

    def max_batches(self, num_workers: int) -> int:
        """An upper bound of the batches of all workers between two syncs."""
        return self.max_anchor * num_workers * _LARGEST_RATIO


class ElChe:
    """Batches per worker until the next sync. The slowest worker runs `anchor` of them, faster ones more.

    A function of the reported times alone: workers that report the same readings have the same counts.

    Args:
        anchor: initial batches of the slowest worker between syncs, and the fewest while syncs are cheap.
        overhead_target: largest cost of a sync, as a fraction of the slowest worker's compute time: the anchor grows
            until syncs cost less. 0.01 to 0.5.
        max_anchor: most batches of the slowest worker between syncs; caps the initial anchor too.
        max_batch_diff: how many batches a worker may be ahead of the slowest at a sync; None for no limit.
        speed_hint: (slow_rank, ratio): every other worker is about `ratio` times as fast. Used until the first sync.
    """

    def __init__(
        self,
        num_workers: int,
        anchor: int = 10,
        *,
        overhead_target: float = 0.10,
        max_anchor: int = 200,
        max_batch_diff: int | None = None,
        speed_hint: tuple[int, float] | None = None,
    ) -> None:
        for name, value in (("num_workers", num_workers), ("anchor", anchor), ("max_anchor", max_anchor)):
            _check_positive(name, value)
        if max_batch_diff is not None:
            _check_positive("max_batch_diff", max_batch_diff)
        if not (isinstance(overhead_target, int | float) and overhead_target > 0):
            raise ValueError(f"overhead_target={overhead_target!r} is not a part of compute time: choose 0.01 to 0.5")
        self.overhead_target = min(max(float(overhead_target), _LEAST_TARGET), _LARGEST_TARGET)
        if self.overhead_target != overhead_target:
            warnings.warn(
                f"overhead_target={overhead_target} is out of range and counts as {self.overhead_target}: "
                "choose 0.01 to 0.5",
                stacklevel=2,
            )
        self._num_workers = num_workers
        self.max_anchor = max_anchor
        self.max_batch_diff = max_batch_diff
        self._speed_hint = None if speed_hint is None else (speed_hint[0], max(float(speed_hint[1]), 1.0))
        self._hinted = (1.0,) * num_workers if speed_hint is None else hinted_speeds(num_workers, *speed_hint)
        self._initial_anchor = self._anchor = min(anchor, max_anchor)
        self._ceiling = max_anchor
        self._ms_per_batch: tuple[Smoothed | None, ...] = (None,) * num_workers
        self._batch_counts = self._proportional_counts()

    @property
    def anchor(self) -> int:
        return self._anchor

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """Batches per worker until the next sync."""
        return self._batch_counts

    @property
    def total_batches(self) -> int:
        return sum(self._batch_counts)

    @property
    def is_calibrated(self) -> bool:
        """Whether every worker has been measured."""
        return None not in self._ms_per_batch

    @property
    def anchor_wall_ms(self) -> float:
        """How long the slowest worker computes between syncs; 0.0 until calibrated."""
        return self._anchor * max(self._measured_ms()) if self.is_calibrated else 0.0

    def clamp_total(self, num_batches: int) -> tuple[int, ...]:
        """The counts if only `num_batches` are left, as at an epoch's end: in the same proportions, possibly 0."""
        if num_batches < 0:
            raise ValueError(f"num_batches={num_batches} is negative: choose num_batches >= 0")
        return self._batch_counts if self.total_batches <= num_batches else shares(num_batches, self._batch_counts)

    def report_timing(self, compute_ms: Sequence[float], batches: Sequence[int], sync_ms: float | None) -> None:
        """Report a sync: each worker's compute time and batches since the last one, and the duration of the sync.

        A worker without a batch (0 ms, 0 batches) gives no reading. Without `sync_ms` the anchor stays.
        """
        self._check_report(compute_ms, batches, sync_ms)
        was_calibrated = self.is_calibrated
        readings = [ms / count if count else 0.0 for ms, count in zip(compute_ms, batches, strict=True)]
        self._ms_per_batch = tuple(
            smoothed if not ms else Smoothed(ms) if smoothed is None else smoothed.after(ms)
            for smoothed, ms in zip(self._ms_per_batch, readings, strict=True)
        )
        if not self.is_calibrated:
            return
        measured = self._measured_ms()
        slowest_ms = readings[measured.index(max(measured))]
        if slowest_ms and sync_ms is not None:
            self._tune_anchor(sync_ms / (self._anchor * slowest_ms))
        moves = [target - count for target, count in zip(self._unlimited_counts(), self._batch_counts, strict=True)]
        # All counts change or none, so that their proportions come from one measurement.
        if not was_calibrated or any(
            abs(move) > _DEAD_BAND * count for move, count in zip(moves, self._batch_counts, strict=True)
        ):
            self._batch_counts = self._proportional_counts()

    def nudge_anchor_down(self, factor: float) -> None:
        """Shrink the anchor, also below its initial value, because replicas drift apart.

        Afterwards it grows by at most one per sync: otherwise an expensive sync would undo this at the next report.
        """
        if not 0 < factor < 1:
            raise ValueError(f"factor={factor} does not shrink the anchor: choose 0 < factor < 1")
        self._anchor = self._ceiling = max(1, math.floor(self._anchor * factor))
        self._batch_counts = self._proportional_counts()

    def regrouped(self, previous_ranks: Sequence[int | None]) -> ElChe:
        """For a changed world. previous_ranks: by new rank, None for a worker that has joined."""
        regrouped = copy(self)
        regrouped._num_workers, regrouped._speed_hint = len(previous_ranks), None
        usual = sum(self._hinted) / len(self._hinted)
        regrouped._hinted = tuple(usual if rank is None else self._hinted[rank] for rank in previous_ranks)
        regrouped._ms_per_batch = tuple(None if rank is None else self._ms_per_batch[rank] for rank in previous_ranks)
        regrouped._batch_counts = regrouped._proportional_counts()
        return regrouped

    def to_dict(self) -> dict[str, Any]:
        """Settings and state; to resume with another setting, replace its entry."""
        return {
            "num_workers": self._num_workers,
            "initial_anchor": self._initial_anchor,
            "overhead_target": self.overhead_target,
            "max_anchor": self.max_anchor,
            "max_batch_diff": self.max_batch_diff,
            "speed_hint": None if self._speed_hint is None else list(self._speed_hint),
            "anchor": self._anchor,
            "ceiling": self._ceiling,
            "batch_counts": list(self._batch_counts),
            "ms_per_batch": [to_entries(smoothed) for smoothed in self._ms_per_batch],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ElChe:
        """What `to_dict` wrote. A missing, unknown or invalid entry is a ValueError that names it."""
        check_entries("El Che's state", values, list(cls(1).to_dict()))
        hint = values["speed_hint"]
        if hint is not None and not (isinstance(hint, list) and [type(value) for value in hint] == [int, float]):
            raise ValueError(f"El Che's speed_hint={hint!r} is not null or a rank and a ratio")
        given = {name: values[name] for name in ("overhead_target", "max_anchor", "max_batch_diff")}
        given["speed_hint"] = hint and tuple(hint)
        el_che = cls(values["num_workers"], values["initial_anchor"], **given)
        for name in ("batch_counts", "ms_per_batch"):
            if not isinstance(values[name], list) or len(values[name]) != el_che._num_workers:
                raise ValueError(
                    f"El Che's {name}={values[name]!r} is not a list of one entry "
                    f"for each of {el_che._num_workers} workers"
                )
        for name in ("anchor", "ceiling"):
            _check_positive(name, values[name])
        for count in values["batch_counts"]:
            _check_positive("batch count", count)
        el_che._ceiling = min(values["ceiling"], el_che.max_anchor)
        el_che._anchor = min(values["anchor"], el_che._ceiling)
        el_che._batch_counts = tuple(values["batch_counts"])
        el_che._ms_per_batch = tuple(from_entries(Smoothed, entries) for entries in values["ms_per_batch"])
        return el_che

    def resumed(self, saved: Mapping[str, Any]) -> ElChe:
        """What `to_dict` wrote; this one if its settings are others, for which the saved counts mean nothing."""
        resumed = ElChe.from_dict(saved)
        names = ("_initial_anchor", "overhead_target", "max_anchor", "max_batch_diff")
        return resumed if all(getattr(resumed, name) == getattr(self, name) for name in names) else self

    def _measured_ms(self) -> list[float]:
        return [smoothed.value for smoothed in self._ms_per_batch if smoothed is not None]

    def _proportional_counts(self) -> tuple[int, ...]:
        """Counts with which all finish together, limited to a lead of `max_batch_diff`."""
        counts = self._unlimited_counts()
        most = max(counts) if self.max_batch_diff is None else min(counts) + self.max_batch_diff
        return tuple(min(count, most) for count in counts)

    def _unlimited_counts(self) -> list[int]:
        """`anchor` batches for the slowest worker, at least as many for the others."""
        ms = self._measured_ms() if self.is_calibrated else [1 / speed for speed in self._hinted]
        return [round(self._anchor * max(ms) / own) for own in ms]

    def _tune_anchor(self, overhead: float) -> None:
        self._ceiling = min(self._ceiling + 1, self.max_anchor)
        if overhead > self.overhead_target:
            self._anchor = min(math.ceil(self._anchor * overhead / self.overhead_target), self._ceiling)
        elif overhead < self.overhead_target / 2 and self._anchor > self._initial_anchor:
            self._anchor -= 1

    def _check_report(self, compute_ms: Sequence[float], batches: Sequence[int], sync_ms: float | None) -> None:
        if not len(compute_ms) == len(batches) == self._num_workers:
            raise ValueError(
                f"{len(compute_ms)} compute times and {len(batches)} batch counts for {self._num_workers} workers: "
                "give one of each per worker"
            )
        for rank, (ms, count) in enumerate(zip(compute_ms, batches, strict=True)):
            if not (0 <= ms < math.inf and count >= 0 and (ms > 0) == (count > 0)):
                raise ValueError(
                    f"worker {rank} reports {ms} ms for {count} batches: give a time > 0 for batches > 0, "
                    "or 0 and 0 for a worker without a batch"
                )
        if sync_ms is not None and not 0 <= sync_ms < math.inf:
            raise ValueError(f"sync_ms={sync_ms} is not a time: give milliseconds >= 0")


def _check_positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} is not a positive integer: choose {name} >= 1")
