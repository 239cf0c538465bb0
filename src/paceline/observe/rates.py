"""The workers' rates and times between two reports of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from time import monotonic

from paceline.core.timing import NOT_MEASURED, Timing, split_sync

# The parts of a worker's time, besides waiting for others.
LANES = ("computing", "data", "exchange", "rest")


@dataclass(frozen=True)
class Rates:
    """Rates of an interval; tuples have one entry per worker.

    shares: micro-batches. waiting: fraction of the time, 0 to 1, spent waiting for slower workers. lanes: the other
    fractions, by name: `computing`, `data` (waiting for data), `exchange` and `rest`; with `waiting` they add up to 1.
    speeds: micro-batches per second while computing, including the wait for data; 0 until measured. efficiency: the
    run's speed over the sum of the workers' speeds. Without a measurement lanes is empty and efficiency None.
    """

    samples_per_s: float
    tokens_per_s: float | None
    shares: tuple[int, ...]
    waiting: tuple[float, ...]
    lanes: Mapping[str, tuple[float, ...]]
    speeds: tuple[float, ...]
    efficiency: float | None


class RateMeter:
    """Accumulates steps; `take` returns the rates since the previous `take`."""

    def __init__(self, num_workers: int) -> None:
        self._begin([NOT_MEASURED] * num_workers)

    def _begin(self, timings: Sequence[Timing]) -> None:
        """timings: each worker's latest measurement."""
        self._start = monotonic()
        self._num_samples = self._num_counted = 0  # of all steps, and of those whose tokens are known
        self._num_tokens = self._exchange_s = 0.0
        self._workers = [_WorkerTotal(timing) for timing in timings]

    def add(
        self, num_samples: int, shares: Sequence[int], timings: Sequence[Timing] = (), num_tokens: float | None = None
    ) -> None:
        """Add a step: each worker's micro-batches, its times (`record.timings`), and the tokens of all workers.

        With averaging the tokens of the first steps are unknown (None). They are assumed to have as many per sample as
        the other steps.
        """
        self._num_samples += num_samples
        if num_tokens is not None:
            self._num_tokens += num_tokens
            self._num_counted += num_samples
        if len(shares) != len(self._workers):  # workers left or joined
            self._workers = [_WorkerTotal() for _ in shares]
        exchange_s, waiting_s = split_sync([timing.sync for timing in timings])
        self._exchange_s += exchange_s
        for worker, count, timing, waited_s in zip_longest(self._workers, shares, timings, waiting_s):
            worker.add(count, timing or NOT_MEASURED, (waited_s or 0.0) + (timing or NOT_MEASURED).feed)

    def take(self) -> Rates:
        seconds, workers = max(monotonic() - self._start, 1e-9), self._workers
        speeds = tuple(worker.speed for worker in workers)
        is_measured = any(speeds)
        fractions = [worker.fractions(seconds, self._exchange_s) for worker in workers]
        counts = tuple(worker.count for worker in workers)
        tokens_per_sample = self._num_tokens / self._num_counted if self._num_counted else None
        rates = Rates(
            samples_per_s=self._num_samples / seconds,
            tokens_per_s=None if tokens_per_sample is None else tokens_per_sample * self._num_samples / seconds,
            shares=counts,
            waiting=tuple(each["waiting"] for each in fractions),
            lanes={name: tuple(each[name] for each in fractions) for name in LANES} if is_measured else {},
            speeds=speeds,
            efficiency=sum(counts) / seconds / sum(speeds) if is_measured else None,
        )
        self._begin([worker.latest for worker in workers])
        return rates


@dataclass
class _WorkerTotal:
    """One worker's sums. latest: the last measurement, used for steps without one."""

    latest: Timing = NOT_MEASURED
    count: int = 0
    busy_s: float = 0.0
    data_s: float = 0.0
    waiting_s: float = 0.0

    def add(self, count: int, timing: Timing, waiting_s: float) -> None:
        self.latest = timing if timing.micro_batch else self.latest
        self.count += count
        self.busy_s += count * self.latest.micro_batch
        self.data_s += count * self.latest.data
        self.waiting_s += waiting_s

    @property
    def speed(self) -> float:
        if self.busy_s:
            return self.count / self.busy_s
        return 1.0 / self.latest.micro_batch if self.latest.micro_batch else 0.0

    def fractions(self, seconds: float, exchange_s: float) -> dict[str, float]:
        """Of this time, by name. Measurements of a GPU lag behind, so their sum may exceed it."""
        parts_s = {
            "computing": self.busy_s - self.data_s,
            "data": self.data_s,
            "waiting": self.waiting_s,
            "exchange": exchange_s,
        }
        total_s = max(seconds, sum(parts_s.values()))
        parts = {name: part_s / total_s for name, part_s in parts_s.items()}
        return {**parts, "rest": max(1.0 - sum(parts.values()), 0.0)}
