"""split_sync: waiting and exchanging. ActiveTimer: time limits that a suspended process does not exceed."""

from __future__ import annotations

import pytest

from paceline.core import timing
from paceline.core.timing import MAX_INTERVAL_S, ActiveTimer, split_sync


@pytest.mark.parametrize(
    ("sync_s", "exchange_s", "waiting_s"),
    [((), 0.0, []), ((0.5,), 0.5, [0.0]), ((0.25, 1.0, 0.5), 0.25, [0.0, 0.75, 0.25])],
)
def test_the_last_worker_does_not_wait(sync_s: tuple[float, ...], exchange_s: float, waiting_s: list[float]) -> None:
    assert split_sync(sync_s) == (exchange_s, waiting_s)


def test_long_intervals_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(timing, "monotonic", lambda: now_s)
    timer = ActiveTimer()
    now_s += 0.25
    assert timer.update() == 0.25
    now_s += 3600
    assert timer.update() == 0.25 + MAX_INTERVAL_S
    timer.reset()
    now_s += 0.25
    assert timer.update() == timer.seconds == 0.25
