from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan import shares as module
from paceline.plan.shares import ranges, shares

few_speeds = st.lists(st.integers(0, 12) | st.floats(0, 10), min_size=1, max_size=4).filter(any)
many_speeds = st.lists(st.floats(0, 1e6), min_size=1, max_size=50).filter(any)


@pytest.mark.parametrize(
    ("num_micro_batches", "speeds", "expected"),
    [
        (8, [6, 2], (6, 2)),
        (8, [1, 5, 2], (1, 5, 2)),
        (5, [1, 1], (3, 2)),
        (5, [6, 2], (4, 1)),
        (8, [1], (8,)),
        (8, [1, 1, 1], (3, 3, 2)),
        (2, [1, 1, 1], (1, 1, 0)),
        (1, [1, 3, 2], (0, 1, 0)),
        (0, [1, 2], (0, 0)),
        (4, [0, 1, 0, 1], (0, 2, 0, 2)),
        (3, [10, 1], (3, 0)),
        # The largest remainders of the proportional shares belong to slow workers, who would finish at 2 and 1.
        (10, [4, 1, 1, 1, 1], (6, 1, 1, 1, 1)),
        (5, [6, 1, 1, 1], (5, 0, 0, 0)),
        # Both (3, 0) and (2, 1) finish at time 1: the second-longest time, 0 or 2/3, decides.
        (3, [3, 1], (3, 0)),
        (3, [1, 3], (0, 3)),
        (8, [1e-300, 1e300], (0, 8)),
    ],
)
def test_shares(num_micro_batches: int, speeds: list[float], expected: tuple[int, ...]) -> None:
    assert shares(num_micro_batches, speeds) == expected


def divisions(total: int, speeds: list[float]) -> Iterator[tuple[int, ...]]:
    """Every division of `total` that gives nothing to speed 0."""
    if len(speeds) == 1:
        if total == 0 or speeds[0]:
            yield (total,)
        return
    for first in range(total + 1 if speeds[0] else 1):
        for rest in divisions(total - first, speeds[1:]):
            yield first, *rest


def times(counts: tuple[int, ...], speeds: list[float]) -> list[Fraction]:
    """Finishing times, longest first, exactly."""
    return sorted((count / Fraction(speed) for count, speed in zip(counts, speeds, strict=True) if speed), reverse=True)


@given(st.integers(0, 9), few_speeds)
def test_no_division_is_better(num_micro_batches: int, speeds: list[float]) -> None:
    """Not in the longest time, nor, where that is equal, in the next ones."""
    best = min(times(counts, speeds) for counts in divisions(num_micro_batches, speeds))
    assert times(shares(num_micro_batches, speeds), speeds) == best


@pytest.mark.parametrize(
    ("num_micro_batches", "speeds", "delays", "expected"),
    [
        (8, [1, 1], [0, 2], (5, 3)),
        (8, [2, 1], [0, 0], (6, 2)),
        (8, [1, 1], [3, 3], (4, 4)),
        (4, [1, 1], [0, 4], (4, 0)),
        (5, [1, 1], [0, 4], (5, 0)),
        (7, [1, 1], [0, 4], (6, 1)),
        # A slow worker's optimizer counts too: without it, 9 would be its share.
        (32, [1, 0.38], [0.4, 2.6], (24, 8)),
    ],
)
def test_delays_count(num_micro_batches: int, speeds: list[float], delays: list[float], expected: tuple) -> None:
    assert shares(num_micro_batches, speeds, delays) == expected


@given(st.integers(0, 9), few_speeds, st.data())
def test_no_division_ends_earlier_with_delays(num_micro_batches: int, speeds: list[float], data: st.DataObject) -> None:
    delays = data.draw(st.lists(st.integers(0, 5) | st.floats(0, 5), min_size=len(speeds), max_size=len(speeds)))

    def end(counts: tuple[int, ...]) -> Fraction:
        """Of those who take part; the others wait in any case."""
        parts = zip(counts, speeds, delays, strict=True)
        return max((Fraction(delay) + n / Fraction(speed) for n, speed, delay in parts if n), default=Fraction(0))

    counts = shares(num_micro_batches, speeds, delays)
    assert sum(counts) == num_micro_batches
    assert end(counts) == min(map(end, divisions(num_micro_batches, speeds)))


@given(st.integers(0, 100_000), many_speeds)
def test_all_are_given_out_and_speed_0_gets_none(num_micro_batches: int, speeds: list[float]) -> None:
    counts = shares(num_micro_batches, speeds)
    assert sum(counts) == num_micro_batches
    assert all(count >= 0 for count in counts)
    assert all(count == 0 for count, speed in zip(counts, speeds, strict=True) if speed == 0)


@given(st.integers(0, 1000), st.integers(1, 60), st.floats(1e-6, 1e6))
def test_equal_speeds_differ_by_at_most_one(num_micro_batches: int, num_workers: int, speed: float) -> None:
    quotient, remainder = divmod(num_micro_batches, num_workers)
    expected = (quotient + 1,) * remainder + (quotient,) * (num_workers - remainder)
    assert shares(num_micro_batches, [speed] * num_workers) == expected


@given(st.integers(0, 1000), st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=10), st.integers(-200, 200))
def test_only_proportions_count(num_micro_batches: int, speeds: list[float], exponent: int) -> None:
    scaled = [math.ldexp(speed, exponent) for speed in speeds]
    assert shares(num_micro_batches, scaled) == shares(num_micro_batches, speeds)


@given(st.integers(0, 200), many_speeds, st.floats(0, 1e6), st.data())
def test_a_faster_worker_never_gets_less(
    num_micro_batches: int, speeds: list[float], gain: float, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(speeds) - 1))
    faster = [speed + gain * (i == rank) for i, speed in enumerate(speeds)]
    assert shares(num_micro_batches, faster)[rank] >= shares(num_micro_batches, speeds)[rank]


@given(st.integers(0, 200), many_speeds)
def test_more_speed_more_share(num_micro_batches: int, speeds: list[float]) -> None:
    by_speed = sorted(zip(speeds, shares(num_micro_batches, speeds), strict=True))
    for (slow, slow_share), (fast, fast_share) in pairwise(by_speed):
        assert slow_share <= fast_share or slow == fast


@given(st.integers(0, 200), st.lists(st.integers(1, 20), min_size=1, max_size=12), st.randoms())
def test_permuted_speeds_permute_shares(num_micro_batches: int, speeds: list[int], random) -> None:
    permuted = random.sample(speeds, len(speeds))
    before = sorted(zip(speeds, shares(num_micro_batches, speeds), strict=True))
    assert sorted(zip(permuted, shares(num_micro_batches, permuted), strict=True)) == before


def test_fewer_micro_batches_than_workers() -> None:
    counts = shares(3, [1.0, 2.0, 4.0, 4.0, 1.0])
    assert counts == (0, 0, 2, 1, 0)
    assert ranges(counts) == (range(0), range(0), range(0, 2), range(2, 3), range(3, 3))


def test_many_workers() -> None:
    speeds = [1 + rank % 7 for rank in range(5000)]
    counts = shares(100_000, speeds)
    assert sum(counts) == 100_000
    finish = max(count / speed for count, speed in zip(counts, speeds, strict=True))
    assert finish >= 100_000 / sum(speeds)
    # Optimal: with all finishing strictly earlier, fewer micro-batches would be done.
    assert sum(math.ceil(finish * speed) - 1 for speed in speeds) < 100_000


@pytest.mark.parametrize(
    ("num_micro_batches", "speeds", "message"),
    [
        (-1, [1], "num_micro_batches=-1 is negative: choose num_micro_batches >= 0"),
        (8, [1, -2], r"speed -2 of worker 1 is not a speed: choose a finite number >= 0"),
        (8, [math.nan], "speed nan of worker 0 is not a speed"),
        (8, [1, 1, math.inf], "speed inf of worker 2 is not a speed"),
        (8, [0, 0.0], r"speeds \(0, 0.0\) give no worker a share: choose at least one speed above 0"),
        (8, [], r"speeds \(\) give no worker a share"),
    ],
)
def test_bad_arguments(num_micro_batches: int, speeds: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shares(num_micro_batches, speeds)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([8], (range(0, 8),)),
        ([6, 2], (range(0, 6), range(6, 8))),
        ([1, 5, 2], (range(0, 1), range(1, 6), range(6, 8))),
        ([], ()),
    ],
)
def test_ranges(counts: list[int], expected: tuple[range, ...]) -> None:
    assert ranges(counts) == expected


@given(st.lists(st.integers(0, 10), max_size=20))
def test_ranges_cover_all_in_rank_order(counts: list[int]) -> None:
    assert [number for numbers in ranges(counts) for number in numbers] == list(range(sum(counts)))
    assert [len(numbers) for numbers in ranges(counts)] == counts


def test_negative_share() -> None:
    with pytest.raises(ValueError, match=r"shares \(2, -1\) contain a negative one: choose shares >= 0"):
        ranges([2, -1])


@given(
    st.integers(0, 2000),
    st.lists(st.floats(0.01, 100) | st.sampled_from((1.0, 2.0)), min_size=64, max_size=80),
    st.lists(st.just(0.0) | st.floats(0, 3), min_size=80, max_size=80),
)
def test_many_workers_divide_as_exact_arithmetic_does(total: int, speeds: list[float], delays: list[float]) -> None:
    delays = delays[: len(speeds)]
    quick = module._quick_shares(total, tuple(speeds), tuple(delays))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MANY", math.inf)
        module._shares.cache_clear()
        exact = shares(total, speeds, delays)
    module._shares.cache_clear()
    assert quick in (None, exact)
    assert shares(total, speeds, delays) == exact


def test_floating_point_is_enough_for_speeds_that_differ() -> None:
    speeds = tuple(1 + math.sqrt(number) for number in range(100))
    assert module._quick_shares(1000, speeds, ()) == shares(1000, speeds)
    assert module._quick_shares(1000, (1.0,) * 100 + (2.0,), ()) is None  # ties are for exact arithmetic
