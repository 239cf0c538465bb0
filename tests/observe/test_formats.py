"""Numbers as people read them."""

from __future__ import annotations

import pytest

from paceline.observe import formats


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1:00"),
        (185, "3:05"),
        (7385, "2:03:05"),
        (86399.6, "1 d 00:00"),
        (3 * 86400 + 4 * 3600, "3 d 04:00"),
        (float("nan"), "?"),
        (float("inf"), "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert formats.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (0.52, "0.52"),
        (9.999, "10.0"),
        (81.34, "81.3"),
        (99.97, "100"),
        (999.6, "1.00k"),
        (52111, "52.1k"),
        (1.5e6, "1.50M"),
        (2e9, "2.00G"),
        (5.21e13, "52.1T"),
        (float("nan"), "?"),
    ],
)
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert formats.rate(value) == text
