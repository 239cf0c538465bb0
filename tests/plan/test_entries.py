from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.balance import Steady
from paceline.plan.cadence import Smoothed
from paceline.plan.entries import from_entries, to_entries

times = st.floats(1e-3, 1e3)


def smoothed(*readings: float) -> Smoothed:
    return reduce(Smoothed.after, readings[1:], Smoothed(readings[0]))


def steady(*readings: float) -> Steady:
    return reduce(Steady.after, readings[1:], Steady.first(readings[0]))


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        pytest.param([7.0], 7.0, id="first reading raw"),
        pytest.param([100.0, 120.0], 104.0, id="factor is the relative distance"),
        pytest.param([100.0, 70.0], 91.0, id="factor is the relative distance, downwards"),
        pytest.param([100.0, 101.0], 100.1, id="factor at least 0.1"),
        pytest.param([2.0, 9.0], 7.6, id="factor at most 0.8"),
        pytest.param([100.0, 40.0], 64.0, id="one reading far below is only followed"),
        pytest.param([100.0, 40.0, 40.0], 40.0, id="two in a row far below replace"),
        pytest.param([100.0, 1000.0, 5000.0], 5000.0, id="two in a row far above replace"),
        pytest.param([100.0, 200.0, 100.0], 100.0, id="off above, then off below: twice in a row, either direction"),
        pytest.param([100.0, 40.0, 64.0, 40.0], 55.0, id="not in a row: only followed"),
        pytest.param([100.0, 40.0, 40.0, 20.0], 30.0, id="after a replacement the count starts again"),
        pytest.param([100.0, 150.0, 240.0], 217.0, id="1.5 times off is not more than 1.5 times"),
    ],
)
def test_smoothed(readings: list[float], expected: float) -> None:
    assert smoothed(*readings).value == pytest.approx(expected, rel=1e-12)


@given(times, st.lists(times, min_size=1, max_size=20))
def test_smoothed_stays_among_the_readings(first: float, readings: list[float]) -> None:
    value = smoothed(first, *readings).value
    assert min([first, *readings]) * (1 - 1e-12) <= value <= max([first, *readings]) * (1 + 1e-12)


@given(st.lists(times, min_size=1, max_size=8), st.floats(1e-3, 1e3))
def test_a_new_speed_is_followed_within_three_readings(before: list[float], now: float) -> None:
    value = smoothed(*before, now, now, now).value
    assert now / 1.5 <= value <= now * 1.5


# A worker that has long been at 1.0 with 10% noise.
SETTLED = Steady(level=1.0, mean=1.0, count=500, recent=(1.0,) * 6, num_readings=500)


@pytest.mark.parametrize(
    ("readings", "level"),
    [
        pytest.param([2.0], 1.0, id="one far off is ignored"),
        pytest.param([1000.0], 1.0, id="however far"),
        pytest.param([2.0, 1.0, 2.0], 1.0, id="two that are not in a row"),
        pytest.param([2.0, 0.5], 1.0, id="two in different directions"),
        pytest.param([2.0, 2.2], 2.1, id="two in a row, slower"),
        pytest.param([0.4, 0.5], 0.45, id="two in a row, faster"),
        pytest.param([1.15, 1.14, 1.15, 1.14, 1.15], 1.0, id="five a little off"),
        pytest.param([1.15, 1.14, 1.15, 1.14, 1.15, 1.16], 1.15, id="six a little off: the mean of the last three"),
        pytest.param([0.87, 0.86, 0.87, 0.86, 0.87, 0.88], 0.87, id="six a little off, faster"),
        pytest.param([1.1, 0.9] * 20, 1.0, id="noise of the size it knows"),
    ],
)
def test_steady(readings: list[float], level: float) -> None:
    assert reduce(Steady.after, readings, SETTLED).level == pytest.approx(level, rel=1e-12)


def test_steady_starts_with_the_first_reading_and_settles_on_the_mean() -> None:
    assert steady(3.0).level == 3.0
    readings = [0.9, 1.1, 1.0, 1.2, 0.8, 1.05, 0.95] * 30
    assert steady(*readings).level == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("first", [0.1, 0.9, 1.6, 100.0])
def test_a_first_reading_that_is_off_is_forgotten_with_the_second(first: float) -> None:
    """A worker's first step is often slow, and says nothing about its noise."""
    assert steady(first, 1.0) == Steady(1.0, 1.0, 1, (1.0,), num_readings=2)
    assert steady(first, 1.0, 1.02, 0.98).level == pytest.approx(1.0, rel=0.02)


def test_steady_moves_ever_more_rarely() -> None:
    one, moves = Steady.first(0.9), []
    for number in range(1, 2000):
        after = one.after([0.9, 1.1, 1.0, 1.2, 0.8, 1.05, 0.95][number % 7])
        if after.level != one.level:
            moves.append(number)
        one = after
    assert len(moves) < 10
    assert moves[-1] < 100


def test_a_new_level_is_refined_by_the_next_readings() -> None:
    one = reduce(Steady.after, [2.0, 2.4], SETTLED)
    assert one.level == pytest.approx(2.2)
    assert reduce(Steady.after, [1.9, 2.0, 2.1, 1.9, 2.1, 2.0, 2.0, 2.0], one).level == pytest.approx(2.04, rel=0.02)


def test_noise_is_learned() -> None:
    """What contradicts a quiet worker's level is nothing new of a noisy one."""
    quiet, noisy = steady(*[1.0, 1.01] * 200), steady(*[0.7, 1.3] * 200)
    assert math.sqrt(quiet.variance) < 0.02
    assert math.sqrt(noisy.variance) > 0.3
    assert quiet.after(1.15).after(1.15).level == pytest.approx(1.15)
    assert noisy.after(1.15).after(1.15).level == noisy.level


def test_lasting_noise_is_told_from_a_change() -> None:
    """Four readings up and four down: the same size as noise that alternates, but the means of six vary more."""
    lasting, short = steady(*[0.9] * 4, *([1.1] * 4 + [0.9] * 4) * 60), steady(*[0.9, 1.1] * 240)
    assert lasting.covariance > 0 > short.covariance
    changes = 0
    for number in range(400):
        after = lasting.after(0.9 if number // 4 % 2 else 1.1)
        changes += after.count < lasting.count
        lasting = after
    assert changes == 0


@given(times, st.lists(times, max_size=40), st.integers(-30, 30))
def test_only_proportions_count(first: float, readings: list[float], exponent: int) -> None:
    """Exactly: seconds or 2**k of them give the same decisions."""
    scaled = [math.ldexp(reading, exponent) for reading in (first, *readings)]
    assert steady(*scaled).level == math.ldexp(steady(first, *readings).level, exponent)


@given(times, st.lists(times, max_size=60))
def test_steady_stays_among_the_readings(first: float, readings: list[float]) -> None:
    level = steady(first, *readings).level
    assert min([first, *readings]) * (1 - 1e-9) <= level <= max([first, *readings]) * (1 + 1e-9)


@given(st.floats(1.6, 1e9), st.booleans())
def test_two_in_a_row_replace_a_settled_level_however_far_off(factor: float, is_faster: bool) -> None:
    reading = 1 / factor if is_faster else factor
    assert SETTLED.after(reading).level == 1.0
    assert SETTLED.after(reading).after(reading).level == reading


@given(times, st.lists(times, max_size=12), st.lists(times, max_size=8))
def test_round_trip(first: float, before: list[float], after: list[float]) -> None:
    for kind, one in ((Smoothed, smoothed(first, *before)), (Steady, steady(first, *before))):
        again = from_entries(kind, json.loads(json.dumps(to_entries(one))))
        assert again == one
        assert reduce(kind.after, after, again) == reduce(kind.after, after, one)


def test_no_reading_round_trip() -> None:
    assert to_entries(None) is None
    assert from_entries(Steady, None) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": 0.0}, "smoothed value 0.0 is not a time"),
        ({"value": "1"}, "smoothed value '1' is not a time"),
        ({"was_off": 1}, "was_off=1 of a smoothed value is neither true nor false"),
        ({"rank": 0}, "a smoothed time has unknown rank: it takes only value, was_off"),
    ],
)
def test_bad_smoothed_entries(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_entries(Smoothed, {"value": 1.0, "was_off": False} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"level": math.nan}, "level nan is not a time"),
        ({"mean": 0}, "mean 0 is not a time"),
        ({"variance": -1.0}, "variance -1.0 is not a time"),
        ({"covariance": math.inf}, "covariance=inf of a steady time is not a finite number"),
        ({"count": 0}, "count=0 of a steady time is not a number of readings: it must be >= 1"),
        ({"num_readings": 2.0}, "num_readings=2.0 of a steady time is not a number of readings"),
        ({"recent": []}, r"recent=\(\) of a steady time are not its last 1 to 6 readings"),
        ({"recent": [1.0] * 7}, "of a steady time are not its last 1 to 6 readings"),
        ({"recent": 1.0}, "recent=1.0 of a steady time are not its last 1 to 6 readings"),
        ({"recent": [1.0, None]}, "recent reading None is not a time"),
        ({"rank": 0}, "a steady time has unknown rank: it takes only level, mean, count, recent"),
    ],
)
def test_bad_steady_entries(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_entries(Steady, to_entries(Steady.first(1.0)) | changes)


def test_no_entries() -> None:
    with pytest.raises(ValueError, match="a smoothed time is 5: it must have value, was_off"):
        from_entries(Smoothed, 5)


def test_missing_entry() -> None:
    values = to_entries(replace(SETTLED, level=2.0))
    del values["level"]
    with pytest.raises(ValueError, match="a steady time lacks level: it needs level, mean, count"):
        from_entries(Steady, values)
