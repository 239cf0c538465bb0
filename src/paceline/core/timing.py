"""What a worker tells the others about its time."""

from __future__ import annotations

from typing import NamedTuple


class Timing(NamedTuple):
    """Seconds; 0.0 where nothing was measured.

    `micro_batch`: for one micro-batch, waiting for its data included. `sync`: in the newest finished exchange, from
    having nothing left to compute to having the result, so waiting for slower workers is in it. `rest`: everything
    else in that step, such as the optimizer.
    """

    micro_batch: float = 0.0
    sync: float = 0.0
    rest: float = 0.0


NOT_MEASURED = Timing()
