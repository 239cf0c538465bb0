"""The times that workers report to each other, and time limits that a suspended process does not exceed."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

DEFAULT_TIMEOUT_S = 600.0  # to wait for other workers
# The longest interval between two updates of an ActiveTimer that counts.
MAX_INTERVAL_S = 0.5


class Timing(NamedTuple):
    """Seconds; 0.0 if not measured.

    `micro_batch`: one micro-batch, including the time to read its samples. `sync`: the latest exchange, from the end of
    compute to the result, including the wait for slower workers. `rest`: everything else in that step, such as the
    optimizer. `data`: the wait for the data of one micro-batch, a part of `micro_batch`. `feed`: in all steps since the
    last report, the wait for a step that workers read in coordination. It is not this worker's work: rank 0 or a slower
    worker is not ready yet.
    """

    micro_batch: float = 0.0
    sync: float = 0.0
    rest: float = 0.0
    data: float = 0.0
    feed: float = 0.0


NOT_MEASURED = Timing()


def split_sync(sync_s: Sequence[float]) -> tuple[float, list[float]]:
    """The duration of the exchange itself, and how long each worker waited for slower ones.

    sync_s: each worker's time from having nothing left to compute to having the result. The last worker to arrive does
    not wait, so its time, the shortest, is the exchange's.
    """
    exchange_s = min(sync_s) if sync_s else 0.0
    return exchange_s, [seconds - exchange_s for seconds in sync_s]


class ActiveTimer:
    """Seconds in which this process was running, since `reset`. It must be updated several times a second.

    Longer intervals between updates do not count: a batch system, a container runtime or Ctrl-Z may suspend all
    processes of a run and continue them hours later.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seconds = 0.0
        self._updated_s = monotonic()

    def update(self) -> float:
        now_s = monotonic()
        self.seconds += min(now_s - self._updated_s, MAX_INTERVAL_S)
        self._updated_s = now_s
        return self.seconds
