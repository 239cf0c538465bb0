"""Which exchange a slow link gets."""

from __future__ import annotations

import pytest

from paceline.plan.slow_link import MAX_BUSY, OPTIONS, choose

MBIT = 1e6 / 8


@pytest.mark.parametrize(
    ("num_values", "num_workers", "mbit", "step_s", "expected", "busy"),
    [
        (1_060_000, 2, 100, 0.05, (32, "int8", 4), 0.054),
        (1_060_000, 2, 10, 0.05, (32, "int8", 4), 0.54),
        (1_060_000, 3, 10, 0.05, (32, "int4", 4), 0.55),
        (1_060_000, 2, 5, 0.05, (32, "int4", 4), 0.55),
        (10_600_000, 2, 10, 0.5, (32, "int8", 4), 0.54),
        (1_060_000, 2, 1, 0.05, (32, "int4", 4), 2.73),  # waits for the link
    ],
)
def test_the_closest_to_synchronous_training_that_the_link_carries(
    num_values: int, num_workers: int, mbit: float, step_s: float, expected: tuple[int, str, int], busy: float
) -> None:
    choice = choose(num_values, num_workers, mbit * MBIT, step_s)
    exchange = choice.exchange
    assert (exchange.every, exchange.compress, exchange.fragments) == expected
    assert choice.busy == pytest.approx(busy, rel=0.02)
    assert f"every {expected[0]} steps in {expected[1]}" in choice.reason
    assert (choice.busy > MAX_BUSY) == ("workers wait for it" in choice.reason)


def test_options_need_fewer_and_fewer_bytes() -> None:
    bits_per_step = [option.bits_per_value / option.every for option in OPTIONS]
    assert bits_per_step == sorted(bits_per_step, reverse=True)
