"""Where the workers' time went: shares, waiting, and the efficiency of a run."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.deferred import DeferredReader
from paceline.core.timing import Timing
from paceline.core.waiting import split_sync
from paceline.plan.shares import Plan
from paceline.sync.numbers import Numbers

STEPS_PER_READ = 32


@dataclass(frozen=True)
class WorkerReport:
    """One worker's part of a run. Times are seconds over all steps.

    `share`: its fraction of the micro-batches. `samples_per_s`: its speed while computing. `waiting_s`: in the
    exchange, for slower workers. `sync_s`: the exchange itself. `rest_s`: everything else, such as the optimizer.
    """

    rank: int
    share: float
    samples_per_s: float
    compute_s: float
    waiting_s: float
    sync_s: float
    rest_s: float


@dataclass(frozen=True)
class Report:
    """All workers' parts. `efficiency`: the run's speed over the sum of its workers' computing speeds."""

    steps: int
    samples_per_s: float
    efficiency: float
    workers: tuple[WorkerReport, ...]

    def __str__(self) -> str:
        header = f"{'worker':>6} {'share':>7} {'samples/s':>10} {'compute':>9} {'waiting':>9} {'sync':>9} {'rest':>9}"
        lines = [
            f"{w.rank:>6} {w.share:>7.1%} {w.samples_per_s:>10.1f} {w.compute_s:>8.1f}s {w.waiting_s:>8.1f}s "
            f"{w.sync_s:>8.1f}s {w.rest_s:>8.1f}s"
            for w in self.workers
        ]
        total = f"{self.samples_per_s:.1f} samples/s, {self.efficiency:.1%} of the sum of the workers' speeds"
        return "\n".join([header, *lines, total])


class Account:
    """Adds up the times of a run's steps. Reads many steps at a time, when their numbers have arrived from the GPU."""

    def __init__(self, num_workers: int) -> None:
        self._totals = [_Total() for _ in range(num_workers)]
        self._reader = DeferredReader(self._read, batch=STEPS_PER_READ, is_ready=lambda step: step[2].has_arrived)
        self._steps = 0
        self._samples = 0
        self._sync_s = 0.0

    def add(self, plan: Plan, num_samples: int, numbers: Numbers) -> None:
        self._reader.add((plan, num_samples, numbers))

    def report(self) -> Report:
        self._reader.flush()
        num_micro_batches = sum(total.micro_batches for total in self._totals)
        wall_s = self._sync_s + max(total.compute_s + total.waiting_s + total.rest_s for total in self._totals)
        sum_of_speeds = sum(total.speed for total in self._totals)
        samples_per_micro_batch = ratio(self._samples, num_micro_batches)
        workers = tuple(
            WorkerReport(
                rank=rank,
                share=ratio(total.micro_batches, num_micro_batches),
                samples_per_s=total.speed * samples_per_micro_batch,
                compute_s=total.compute_s,
                waiting_s=total.waiting_s,
                sync_s=self._sync_s,
                rest_s=total.rest_s,
            )
            for rank, total in enumerate(self._totals)
        )
        efficiency = ratio(num_micro_batches, wall_s * sum_of_speeds)
        return Report(self._steps, ratio(self._samples, wall_s), efficiency, workers)

    def _read(self, step: tuple[Plan, int, Numbers]) -> None:
        plan, num_samples, numbers = step
        self._steps += 1
        self._samples += num_samples
        timings = numbers.timings
        sync_s, waiting_s = split_sync([timing.sync for timing in timings])
        self._sync_s += sync_s
        for total, own, timing, waited_s in zip(self._totals, plan, timings, waiting_s, strict=True):
            total.add(len(own), timing, waited_s)


class _Total:
    """One worker's sums."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self.compute_s = self.waiting_s = self.rest_s = 0.0
        self._micro_batch_s = 0.0  # as last measured
        self._unmeasured_steps = 0

    def add(self, micro_batches: int, timing: Timing, waiting_s: float) -> None:
        self.micro_batches += micro_batches
        self._micro_batch_s = timing.micro_batch or self._micro_batch_s
        self.compute_s += micro_batches * self._micro_batch_s
        self.waiting_s += waiting_s
        # Not every step has a measurement: with averaging, workers report when they average.
        self._unmeasured_steps += 1
        if timing.rest:
            self.rest_s += timing.rest * self._unmeasured_steps
            self._unmeasured_steps = 0

    @property
    def speed(self) -> float:
        """Micro-batches per second while computing."""
        return ratio(self.micro_batches, self.compute_s)


def ratio(part: float, whole: float) -> float:
    """0.0 where nothing was measured."""
    return part / whole if whole else 0.0
