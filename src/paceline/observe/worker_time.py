"""Where a worker's time went, whichever file it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerTime:
    """seconds: by kind, such as "compute", "wait" (for slower workers), "sync" (exchange) and "other".

    Kinds that were not measured are missing; otherwise the seconds add up to `total_s`. share: the worker's fraction
    of the micro-batches, if known.
    """

    rank: int
    total_s: float
    seconds: Mapping[str, float]
    share: float | None = None

    def part(self, kind: str) -> float:
        """The fraction of the time spent on a kind, 0 to 1."""
        return self.seconds[kind] / self.total_s if self.total_s else 0.0
