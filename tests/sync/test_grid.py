"""The grid: rounding is exact and independent of order, and knows when it is not."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.sync.buckets import add_exactly
from paceline.sync.grid import COARSEST_BITS, HEADROOM_BITS, Grid


@given(
    top=st.integers(-40, 40),
    terms=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
)
def test_sums_of_rounded_terms_do_not_depend_on_order(top: int, terms: list[float], seed: int) -> None:
    grid = Grid(top)
    scale = math.ldexp(1.0, top) / len(terms)
    shuffled = terms[:]
    random.Random(seed).shuffle(shuffled)
    assert _sum(grid, [t * scale for t in terms]) == _sum(grid, [t * scale for t in shuffled])


@given(top=st.integers(-20, 20), x=st.floats(-1, 1))
def test_rounding_moves_by_at_most_half_a_grid_step(top: int, x: float) -> None:
    grid, x = Grid(top), math.ldexp(x, top)
    rounded = _sum(grid, [x])
    step = math.ldexp(1.0, top - 51)
    assert abs(rounded - x) <= step / 2
    assert math.fmod(rounded, step) == 0.0


def test_outside_of_the_grid_order_matters() -> None:
    """Why validity is checked at all: beyond its limit the same terms give different sums."""
    grid = Grid(0)
    terms = [2.0**53 + 2.0, -(2.0**53), 2.0**-51, 0.3]
    assert _sum(grid, terms) != _sum(grid, terms[::-1])
    assert not grid.fits(list(map(abs, terms)))


@pytest.mark.parametrize(
    ("peaks", "fits"),
    [
        ([0.0, 0.0], True),
        ([1.0], True),
        ([2.0**10], True),
        ([2.0**10 * 1.001], False),
        ([2.0**9, 2.0**9], True),
        ([2.0**9, 2.0**9 * 1.001], False),
        ([2.0 ** (10 - COARSEST_BITS)], True),
        ([2.0 ** (9 - COARSEST_BITS)], False),
    ],
)
def test_fits_by_term_not_by_sum(peaks: list[float], fits: bool) -> None:
    assert Grid(10).fits(peaks) is fits


@pytest.mark.parametrize(
    ("peak", "top"),
    [
        (0.0, 10),  # nothing to learn from
        (2.0**8, 10),  # comfortable
        (2.0**-2, 10),  # just comfortable
        (2.0**9, 10 + HEADROOM_BITS),
        (2.0**-3, -2 + HEADROOM_BITS),
        (1e30, 100 + HEADROOM_BITS),
        (math.nan, 10),
        (math.inf, 10),
    ],
)
def test_follow(peak: float, top: int) -> None:
    grid = Grid(10)
    grid.follow([peak])
    assert grid.top == top
    assert grid.fits([peak])


def _sum(grid: Grid, terms: list[float]) -> float:
    total = torch.zeros(1, dtype=torch.float64)
    for term in terms:
        add_exactly(total, torch.tensor([term], dtype=torch.float64), 1.0, grid, first=False)
    return total.item()
