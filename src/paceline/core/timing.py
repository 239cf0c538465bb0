"""The times that a worker reports to the others."""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_TIMEOUT_S = 600.0  # to wait for other workers


class Timing(NamedTuple):
    """Seconds; 0.0 if not measured.

    `micro_batch`: one micro-batch, including the wait for its data. `sync`: the latest exchange, from the end of
    compute to the result, including the wait for slower workers. `rest`: everything else in that step, such as the
    optimizer.
    """

    micro_batch: float = 0.0
    sync: float = 0.0
    rest: float = 0.0


NOT_MEASURED = Timing()
