"""The times that a worker reports to the others."""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_TIMEOUT_S = 600.0  # to wait for other workers


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
