"""How the time that workers spend in an exchange divides into waiting and exchanging."""

from __future__ import annotations

from collections.abc import Sequence


def split_sync(sync_s: Sequence[float]) -> tuple[float, list[float]]:
    """The duration of the exchange itself, and how long each worker waited for slower ones.

    sync_s: each worker's time from having nothing left to compute to having the result. The last worker to arrive does
    not wait, so its time, the shortest, is the exchange's.
    """
    exchange_s = min(sync_s) if sync_s else 0.0
    return exchange_s, [seconds - exchange_s for seconds in sync_s]
