"""Dividing a batch by measured speed: per step over micro-batches (ours), and flodl's chunks of samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.plan.shares import shares
from paceline.plan.smoothing import Steady, check_entries, from_entries, to_entries

# A worker whose best share is nothing gets one micro-batch in as many steps, so that it stays measured.
_TURN = 10

_LEAST_RATIO = 0.05
_EMA_FACTOR = 0.3
_BALANCED_WITHIN = 1e-6


class Balancer:
    """Who takes how many of a step's micro-batches, from the times that all workers exchanged in earlier steps.

    A function of the readings alone: workers that observe the same readings divide every step alike. `hints` are
    relative speeds to start with; a worker's first reading replaces its hint.
    """

    def __init__(self, num_workers: int, hints: Sequence[float] | None = None) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: a world has at least 1 worker")
        self._hints = (1.0,) * num_workers if hints is None else tuple(hints)
        if len(self._hints) != num_workers:
            raise ValueError(f"hints={list(self._hints)} names {len(self._hints)} workers, the world has {num_workers}")
        for rank, hint in enumerate(self._hints):
            if not (isinstance(hint, int | float) and 0 < hint < math.inf):
                raise ValueError(f"the hint {hint!r} of worker {rank} is not a speed: choose a finite number > 0")
        self._times: tuple[Steady | None, ...] = (None,) * num_workers
        self._delays: tuple[Steady | None, ...] = (None,) * num_workers
        self._num_steps = 0

    def observe(self, seconds_per_micro_batch: Sequence[float], delays: Sequence[float] | None = None) -> None:
        """The exchanged readings of one step, by rank; 0.0 stands for a worker without a micro-batch in it.

        `delays` are what a step takes of a worker beside its micro-batches, such as its optimizer; 0.0 if unknown.
        """
        self._times = self._after(self._times, seconds_per_micro_batch)
        if delays is not None:
            self._delays = self._after(self._delays, delays)
        self._num_steps += 1

    def _after(self, levels: tuple[Steady | None, ...], readings: Sequence[float]) -> tuple[Steady | None, ...]:
        if len(readings) != len(levels):
            raise ValueError(f"{len(readings)} readings for {len(levels)} workers: give one per worker, 0.0 for none")
        for rank, seconds in enumerate(readings):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"the reading {seconds} of worker {rank} is not a time: give seconds, 0.0 for none")
        return tuple(
            level if not seconds else Steady.first(seconds) if level is None else level.after(seconds)
            for level, seconds in zip(levels, readings, strict=True)
        )

    @property
    def speeds(self) -> tuple[float, ...]:
        """Micro-batches per second by which the next step is divided; the hints as long as nobody was measured."""
        measured = [(1 / time.level, hint) for time, hint in zip(self._times, self._hints, strict=True) if time]
        # Hints are relative: those still in use are put on the scale of the measured workers.
        scale = math.fsum(s for s, _ in measured) / math.fsum(h for _, h in measured) if measured else 1.0
        return tuple(
            1 / time.level if time else hint * scale for time, hint in zip(self._times, self._hints, strict=True)
        )

    @property
    def delays(self) -> tuple[float, ...]:
        """Seconds per step that a worker is busy beside its micro-batches."""
        return tuple(delay.level if delay else 0.0 for delay in self._delays)

    def shares(self, num_micro_batches: int) -> tuple[int, ...]:
        """The next step's shares, for any number of micro-batches; asking changes nothing."""
        speeds = self.speeds
        counts = shares(num_micro_batches, speeds, self.delays)
        turn, position = divmod(self._num_steps, _TURN)
        return _with_idle(counts, speeds, turn) if position == _TURN - 1 else counts

    def to_dict(self) -> dict[str, Any]:
        return {
            "hints": list(self._hints),
            "num_steps": self._num_steps,
            "times": [to_entries(time) for time in self._times],
            "delays": [to_entries(delay) for delay in self._delays],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Balancer:
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
        balancer = cls(len(hints), hints)
        balancer._num_steps = num_steps
        balancer._times = tuple(from_entries(Steady, time) for time in values["times"])
        balancer._delays = tuple(from_entries(Steady, delay) for delay in values["delays"])
        return balancer


def _with_idle(counts: Sequence[int], speeds: Sequence[float], turn: int = 0) -> tuple[int, ...]:
    """Every idle worker takes one from the worker that would finish last, one that keeps some if there is one.

    Where there are not enough for all idle workers, `turn` decides who comes first.
    """
    idle = [rank for rank, count in enumerate(counts) if count == 0]
    busy = [rank for rank, count in enumerate(counts) if count > 0]
    result = list(counts)
    first = turn % len(idle) if idle else 0
    for rank in (idle[first:] + idle[:first])[: sum(counts)]:
        last = max(busy, key=lambda b: (result[b] > 1, result[b] / speeds[b]))
        result[last] -= 1
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


def chunk_ratios(throughputs: Sequence[float]) -> tuple[float, ...]:
    """The parts of a batch by throughput, none below 5%: what that takes comes from the others in proportion."""
    if not all(0 <= throughput < math.inf for throughput in throughputs) or not any(throughputs):
        raise ValueError(
            f"throughputs {tuple(throughputs)} divide nothing: choose finite numbers >= 0, one of them above 0"
        )
    least = min(_LEAST_RATIO, 1 / len(throughputs))
    by_throughput = sorted(range(len(throughputs)), key=lambda rank: throughputs[rank])
    # The slowest first: who is below the least part gets it, and the others divide what that leaves.
    for num_least in range(len(by_throughput)):
        others = math.fsum(throughputs[rank] for rank in by_throughput[num_least:])
        left = 1 - num_least * least
        if left * throughputs[by_throughput[num_least]] >= least * others:
            break
    floored = set(by_throughput[:num_least])
    return tuple(
        least if rank in floored else left * throughput / others for rank, throughput in enumerate(throughputs)
    )


def chunk_sizes(batch_size: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Samples per worker in these proportions, as whole numbers of at least 1 that sum to the batch."""
    if batch_size < len(ratios):
        raise ValueError(
            f"batch_size={batch_size} leaves one of {len(ratios)} workers without a sample: "
            f"choose batch_size >= {len(ratios)}"
        )
    return _with_idle(shares(batch_size, ratios), ratios)


def is_balanced(ratios: Sequence[float]) -> bool:
    """Whether the parts are equal, so that a plain mean of the workers' gradients is right."""
    return all(abs(ratio - ratios[0]) < _BALANCED_WITHIN for ratio in ratios)


def smoothed_throughput(previous: float, reading: float) -> float:
    """The moving average with factor 0.3; the first reading (`previous` 0) is taken as it is, reading 0 is none."""
    if not previous or not reading:
        return reading or previous
    return _EMA_FACTOR * reading + (1 - _EMA_FACTOR) * previous


def gradient_weights(chunk_sizes: Sequence[int]) -> tuple[float, ...]:
    """What each worker's mean gradient counts in the mean over the batch."""
    total = sum(chunk_sizes)
    if total <= 0 or min(chunk_sizes) < 0:
        raise ValueError(f"chunk sizes {tuple(chunk_sizes)} have no mean: choose sizes >= 0, one of them above 0")
    return tuple(size / total for size in chunk_sizes)


@dataclass(frozen=True)
class RebalanceSchedule:
    """flodl's schedule for chunks: first after so many steps, then at an interval. (`Balancer` plans every step.)"""

    first: int = 10
    interval: int = 50

    def __post_init__(self) -> None:
        for name in ("first", "interval"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is not a number of steps: choose {name} >= 1")

    def is_due(self, num_steps: int) -> bool:
        """Whether to rebalance once `num_steps` steps are done."""
        return num_steps >= self.first and (num_steps - self.first) % self.interval == 0
