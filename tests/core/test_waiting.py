"""split_sync: waiting and exchanging."""

from __future__ import annotations

import pytest

from paceline.core.waiting import split_sync


@pytest.mark.parametrize(
    ("sync_s", "exchange_s", "waiting_s"),
    [((), 0.0, []), ((0.5,), 0.5, [0.0]), ((0.25, 1.0, 0.5), 0.25, [0.0, 0.75, 0.25])],
)
def test_the_last_worker_does_not_wait(sync_s: tuple[float, ...], exchange_s: float, waiting_s: list[float]) -> None:
    assert split_sync(sync_s) == (exchange_s, waiting_s)
