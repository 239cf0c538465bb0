"""Where the workers' time went: shares, waiting, and the efficiency of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerReport:
    """One worker's part of a run. Times are seconds over all steps.

    `share`: its fraction of the micro-batches. `samples_per_s`: its speed while computing. `waiting_s`: for slower
    workers, in the exchange and where rank 0 reads for all. `sync_s`: the exchange itself. `rest_s`: everything else,
    such as the optimizer.
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


def ratio(part: float, whole: float) -> float:
    """0.0 where nothing was measured."""
    return part / whole if whole else 0.0
