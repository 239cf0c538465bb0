"""Rates between two reports."""

from __future__ import annotations

import pytest

from paceline.observe import rates
from paceline.observe.rates import RateMeter


def test_rates_are_those_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(rates, "monotonic", lambda: now_s)
    meter = RateMeter(2)
    for _ in range(4):
        now_s += 0.5
        meter.add(16, (3, 1), [0.1, 0.3], num_tokens=100)
    found = meter.take()
    assert (found.samples_per_s, found.tokens_per_s, found.shares) == (32.0, 200.0, (12, 4))
    assert found.waiting == pytest.approx((0.0, 0.4))
    now_s += 1.0
    meter.add(8, (2, 2))
    again = meter.take()
    assert (again.samples_per_s, again.tokens_per_s, again.shares, again.waiting) == (8.0, None, (2, 2), (0.0, 0.0))
