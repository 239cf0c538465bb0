"""What a slow link has to carry."""

from __future__ import annotations

import pytest

from paceline.plan.slow_link import link_use

MBIT = 1e6 / 8


@pytest.mark.parametrize(
    ("num_values", "num_workers", "mbit", "step_s", "busy"),
    [
        (1_060_000, 2, 100, 0.05, 0.027),
        (1_060_000, 2, 10, 0.05, 0.27),
        (1_060_000, 3, 10, 0.05, 0.55),
        (10_600_000, 2, 10, 0.5, 0.27),
        (1_060_000, 2, 1, 0.05, 2.73),  # waits for the link
    ],
)
def test_how_much_of_its_time_the_link_is_used(
    num_values: int, num_workers: int, mbit: float, step_s: float, busy: float
) -> None:
    use = link_use(num_values, num_workers, mbit * MBIT, step_s)
    assert use.busy == pytest.approx(busy, rel=0.02)
    assert (use.busy > 1) == ("workers wait for it" in use.reason)


def test_the_reason_names_what_was_measured() -> None:
    assert link_use(1_060_000, 2, 10 * MBIT, 0.05).reason == (
        "averaging every 32 steps in int4, in 8 parts: a step takes 50 ms and the link carries 10 Mbit/s per worker, "
        "so it is used 27% of the time"
    )
    reason = link_use(1_060_000, 2, MBIT, 0.05).reason
    assert (
        "used 100% of the time; workers wait for it: no coarser exchange is known to keep the loss within 1%" in reason
    )
    assert "a step takes 6000 ms and the link carries 1030 Mbit/s" in link_use(1, 2, 1030 * MBIT, 6.0).reason
