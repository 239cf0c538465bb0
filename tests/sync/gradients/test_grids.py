"""Grids: where sums are exact, and when they move."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.sync.gradients.grids import (
    CALIBRATION_HEADROOM_BITS,
    COARSEST_BITS,
    HEADROOM_BITS,
    INITIAL_TOP,
    Grids,
)


def grids(top: int = 10) -> Grids:
    made = Grids(["a"])
    made.load({"a": top})
    return made


def peaks(*values: float) -> np.ndarray:
    return np.array(values)


def test_an_anchor_rounds_to_a_multiple_of_the_step() -> None:
    anchor = grids(10).anchors[0]
    step = 2.0 ** (10 - 51)
    for x in (0.3, -0.3, 512.0, 1.5 * step, -0.5 * step, 0.0):
        rounded = (x + anchor) - anchor
        assert rounded % step == 0
        assert abs(rounded - x) <= step / 2


@pytest.mark.parametrize(
    ("peak", "num_terms", "fits"),
    [
        (2.0**10, 1, True),
        (2.0**10 * 1.01, 1, False),  # over
        (2.0**10 / 8, 8, True),
        (2.0**10 / 8 * 1.01, 8, False),  # the sum of eight such could be over
        (2.0 ** (10 - COARSEST_BITS), 1, True),
        (2.0 ** (10 - COARSEST_BITS) / 1.01, 1, False),  # keeps fewer bits than float32
        (0.0, 1, True),
        (np.inf, 1, True),
        (np.nan, 1, True),
    ],
)
def test_what_fits(peak: float, num_terms: int, fits: bool) -> None:
    assert grids(10).fit(peaks(peak), num_terms) is fits
    # A quick look never says yes where a closer one says no.
    assert fits or not grids(10).are_comfortable(peaks(peak), num_terms)


@pytest.mark.parametrize(
    ("peak", "top"),
    [
        (2.0**8, 10),
        (2.0**-2, 10),  # the edges of the comfortable range
        (2.0**8 * 1.01, 9 + HEADROOM_BITS),
        (2.0**-2 / 1.01, 9),  # one bit at a time
        (2.0**-10, 9),
        (2.0**-20, -19 + HEADROOM_BITS),  # too coarse: at once
        (0.0, 10),
        (np.nan, 10),
    ],
)
def test_grids_follow_their_peaks(peak: float, top: int) -> None:
    made = grids(10)
    assert made.follow(peaks(peak), 1) is (top != 10)
    assert made.state() == {"a": top}
    if np.isfinite(peak) and peak:
        assert made.fit(peaks(peak), 1)


def test_each_tensor_has_its_own() -> None:
    made = Grids(["large", "small", "unused"])
    assert not made.are_known
    made.calibrate(peaks(2.0**100, 2.0**-100, 0.0), num_terms=4)
    assert made.are_known
    assert made.state() == {
        "large": 103 + CALIBRATION_HEADROOM_BITS,
        "small": -97 + CALIBRATION_HEADROOM_BITS,
        "unused": INITIAL_TOP,
    }
    assert made.fit(peaks(2.0**100, 2.0**-100, 0.0), 4)


def test_what_is_known_is_not_calibrated_again() -> None:
    made = Grids(["known", "new"])
    made.load({"known": 3, "gone": 7})
    assert not made.are_known
    made.calibrate(peaks(2.0**50, 1.0), 1)
    assert made.state() == {"known": 3, "new": 1 + CALIBRATION_HEADROOM_BITS}
