"""Time limits that a suspended process does not exceed."""

from __future__ import annotations

import pytest

from paceline.core import active_timer
from paceline.core.active_timer import MAX_INTERVAL_S, ActiveTimer


def test_long_intervals_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(active_timer, "monotonic", lambda: now_s)
    timer = ActiveTimer()
    now_s += 0.25
    assert timer.update() == 0.25
    now_s += 3600
    assert timer.update() == 0.25 + MAX_INTERVAL_S
    timer.reset()
    now_s += 0.25
    assert timer.update() == timer.seconds == 0.25
