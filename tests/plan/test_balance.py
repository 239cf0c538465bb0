"""Balancing. The literal cases of FEATURES.md row B8 are the tests named `test_b8_...`."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.balance import Balancer, hinted_speeds
from paceline.plan.shares import shares

throughputs = st.lists(st.floats(0, 1e6), min_size=1, max_size=30).filter(any)


def test_b8_hint() -> None:
    assert hinted_speeds(3, 1, 3.0) == (3.0, 1.0, 3.0)


def test_b8_hint_ratio_below_1_counts_as_1() -> None:
    with pytest.warns(UserWarning, match=r"the speed hint's ratio=0.25 counts as 1: slow_rank names the slowest"):
        assert hinted_speeds(2, 1, 0.25) == (1.0, 1.0)


@pytest.mark.parametrize("slow_rank", [-1, 3])
def test_b8_hint_for_a_rank_that_does_not_exist(slow_rank: int) -> None:
    message = f"the speed hint's slow_rank={slow_rank} is not in a world of 3: choose 0 <= slow_rank < 3"
    with pytest.raises(ValueError, match=message):
        hinted_speeds(3, slow_rank, 2.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hinted_speeds(2, 0, math.inf), "the speed hint's ratio=inf is not a ratio of speeds"),
    ],
)
def test_bad_chunks(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def observed(num_workers: int, *steps: list[float], hints: list[float] | None = None) -> Balancer:
    balancer = Balancer(num_workers, hints)
    for seconds in steps:
        balancer.observe(seconds)
    return balancer


@pytest.mark.parametrize(
    ("steps", "hints", "num_micro_batches", "expected"),
    [
        pytest.param([], None, 8, (4, 4), id="equal at first"),
        pytest.param([], [3.0, 1.0], 8, (6, 2), id="hints at first"),
        pytest.param([[1.0, 2.5]], None, 32, (23, 9), id="the first reading is taken as it is"),
        pytest.param([[1.0, 2.5]], [1.0, 3.0], 32, (23, 9), id="and replaces the hint"),
        pytest.param([[0.1, 0.0]], [1.0, 3.0], 8, (2, 6), id="a hint stands until its worker was measured"),
        pytest.param([[0.1, 0.0], [0.0, 0.1]], [1.0, 3.0], 8, (4, 4), id="measured in different steps"),
        pytest.param([[1.0, 2.5]], None, 0, (0, 0), id="nothing to divide"),
        pytest.param([[1.0, 1.0]] * 20 + [[1.0, 2.5]], None, 32, (16, 16), id="one slow step changes nothing"),
        pytest.param([[1.0, 1.0]] * 20 + [[1.0, 2.5]] * 2, None, 32, (23, 9), id="the second one does"),
        pytest.param([[1.0, 2.5]] * 20 + [[1.0, 1.0]] * 2, None, 32, (16, 16), id="and back"),
        pytest.param([[30.0, 1.0], [1.0, 1.0], [1.0, 1.0]], None, 8, (4, 4), id="a slow first step is forgotten"),
    ],
)
def test_shares(
    steps: list[list[float]], hints: list[float] | None, num_micro_batches: int, expected: tuple[int, ...]
) -> None:
    assert observed(2, *steps, hints=hints).shares(num_micro_batches) == expected


def test_speeds() -> None:
    assert Balancer(2).speeds == (1.0, 1.0)
    assert Balancer(2, [3, 1]).speeds == (3.0, 1.0)
    assert observed(2, [0.5, 0.25]).speeds == (2.0, 4.0)
    assert observed(3, [0.5, 0.0, 0.0], hints=[1.0, 2.0, 4.0]).speeds == (2.0, 4.0, 8.0)


def test_a_worker_without_a_share_gets_one_in_ten_steps() -> None:
    balancer, given_out = Balancer(3), []
    for _ in range(40):
        counts = balancer.shares(8)
        given_out.append(counts)
        balancer.observe([0.1 * (counts[0] > 0), 50.0, 0.1 * (counts[2] > 0)])
    assert given_out[1:9] == [(4, 0, 4)] * 8
    assert given_out[9::10] == [(3, 1, 4)] * 4
    assert [step for step, counts in enumerate(given_out) if step and counts[1]] == [9, 19, 29, 39]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(0, 12), st.integers(0, 30))
def test_everybody_is_measured(times: list[float], num_micro_batches: int, before: int) -> None:
    """In every ten steps, or where there are fewer micro-batches than workers without a share, in turn."""
    balancer = Balancer(len(times))
    for _ in range(before):
        balancer.observe(times)
    seen = [0] * len(times)
    for _ in range(10 * len(times)):
        counts = balancer.shares(num_micro_batches)
        assert sum(counts) == num_micro_batches
        assert min(counts) >= 0
        seen = [a + b for a, b in zip(seen, counts, strict=True)]
        balancer.observe(times)
    assert all(seen) or num_micro_batches == 0
    if num_micro_batches >= len(times):
        recent = [0] * len(times)
        for _ in range(10):
            recent = [a + b for a, b in zip(recent, balancer.shares(num_micro_batches), strict=True)]
            balancer.observe(times)
        assert all(recent)


readings = st.lists(st.lists(st.just(0.0) | st.floats(1e-4, 1e2), min_size=3, max_size=3), max_size=30)


@given(readings, st.integers(0, 40))
def test_asking_changes_nothing(steps: list[list[float]], num_micro_batches: int) -> None:
    """An epoch's tail, or a report, may ask for other numbers of micro-batches."""
    balancer = observed(3, *steps)
    before = balancer.to_dict()
    first = balancer.shares(num_micro_batches)
    balancer.shares(num_micro_batches + 1)
    assert balancer.shares(num_micro_batches) == first
    assert balancer.to_dict() == before


@given(readings, readings, st.integers(1, 40))
def test_same_readings_same_shares(before: list[list[float]], after: list[list[float]], num: int) -> None:
    """On every worker, and on one that resumes from the saved state."""
    one = observed(3, *before, hints=[1.0, 2.0, 3.0])
    other = Balancer.from_dict(json.loads(json.dumps(one.to_dict())))
    assert other.to_dict() == one.to_dict()
    for seconds in after:
        one.observe(seconds)
        other.observe(seconds)
        assert one.shares(num) == other.shares(num)
    assert other.to_dict() == one.to_dict()


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=5), st.integers(1, 8), st.integers(0, 64))
def test_steady_times_give_the_least_finishing_time(times: list[float], num_steps: int, num: int) -> None:
    assert observed(len(times), *[times] * num_steps).shares(num) == shares(num, [1 / time for time in times])


def test_what_a_step_takes_beside_its_micro_batches_counts() -> None:
    balancer = Balancer(2)
    balancer.observe([1.0, 1.0], [0.0, 0.0])  # nothing is known of it in the first step
    assert balancer.shares(8) == (4, 4)
    balancer.observe([1.0, 1.0], [0.1, 2.1])
    assert balancer.shares(8) == (5, 3)
    assert Balancer.from_dict(json.loads(json.dumps(balancer.to_dict()))).shares(8) == (5, 3)
    with pytest.raises(ValueError, match="1 readings for 2 workers"):
        balancer.observe([1.0, 1.0], [0.1])


@given(st.lists(st.floats(1e-2, 1e2), min_size=2, max_size=5), st.floats(1.0, 100.0), st.integers(0, 64), st.data())
def test_a_slower_worker_never_gets_more(times: list[float], factor: float, num: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(times) - 1))
    slower = [time * (factor if i == rank else 1) for i, time in enumerate(times)]
    assert observed(len(times), slower).shares(num)[rank] <= observed(len(times), times).shares(num)[rank]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Balancer(0), "num_workers=0: a world has at least 1 worker"),
        (lambda: Balancer(2, [1.0]), r"hints=\[1.0\] names 1 workers, the world has 2"),
        (lambda: Balancer(2, [1.0, 0.0]), "the hint 0.0 of worker 1 is not a speed: choose a finite number > 0"),
        (lambda: Balancer(2).observe([1.0]), "1 readings for 2 workers: give one per worker, 0.0 for none"),
        (lambda: Balancer(2).observe([1.0, -1.0]), "the reading -1.0 of worker 1 is not a time: give seconds"),
        (lambda: Balancer(2).observe([math.nan, 1.0]), "the reading nan of worker 0 is not a time"),
        (lambda: Balancer(2).shares(-1), "num_micro_batches=-1 is negative"),
    ],
)
def test_bad_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "the balancer's state has unknown rank: it takes only hints, num_steps, times"),
        ({"num_steps": -1}, "the balancer's num_steps=-1 is not a count: it must be an integer >= 0"),
        ({"num_steps": True}, "the balancer's num_steps=True is not a count"),
        ({"times": [None]}, r"times=\[None\] are not lists of one entry per worker"),
        ({"delays": [None]}, r"delays=\[None\] are not lists of one entry per worker"),
        ({"hints": None}, "the balancer's hints=None and times="),
        ({"hints": [1.0, "2"]}, "the hint '2' of worker 1 is not a speed"),
        ({"times": [None, {}]}, "a steady time lacks level, mean, count"),
        ({"hints": [1.0, -1.0]}, "the hint -1.0 of worker 1 is not a speed"),
    ],
)
def test_bad_state(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Balancer.from_dict(Balancer(2).to_dict() | changes)


@pytest.mark.parametrize("name", ["hints", "num_steps", "times", "delays"])
def test_incomplete_state(name: str) -> None:
    values = Balancer(2).to_dict()
    del values[name]
    with pytest.raises(ValueError, match=f"the balancer's state lacks {name}: it needs hints, num_steps, times"):
        Balancer.from_dict(values)


# Simulations. A step's reading is the worker's true time with log-normal noise; a step takes as long as its last
# worker. The figures in the comments are means over a hundred and more runs.


def finishing_time(counts: tuple[int, ...], times: list[float]) -> float:
    return max(count * time for count, time in zip(counts, times, strict=True))


def noisy(times: list[float], noise: list[float], draw: random.Random) -> list[float]:
    return [time * math.exp(draw.gauss(0, sigma)) for time, sigma in zip(times, noise, strict=True)]


def long_run(
    times: list[float], noise: list[float], nums: list[int], seed: int, num_steps: int = 2000
) -> dict[int, tuple[float, float]]:
    """By number of micro-batches: how often shares changed, and the time lost against the best fixed shares."""
    draw = random.Random(seed)
    balancer = Balancer(len(times))
    best = {num: shares(num, [1 / time for time in times]) for num in nums}
    changes, took, least = dict.fromkeys(nums, 0), dict.fromkeys(nums, 0.0), dict.fromkeys(nums, 0.0)
    speeds, counts = balancer.speeds, {num: balancer.shares(num) for num in nums}
    for _ in range(num_steps):
        now = noisy(times, noise, draw)
        for num in nums:
            took[num] += finishing_time(counts[num], now)
            least[num] += finishing_time(best[num], now)
        balancer.observe(now)
        if balancer.speeds != speeds:
            speeds, before = balancer.speeds, counts
            counts = {num: balancer.shares(num) for num in nums}
            changes = {num: changes[num] + (counts[num] != before[num]) for num in nums}
    return {num: (changes[num] / num_steps, took[num] / least[num] - 1) for num in nums}


# At 10% noise and 8, 16, 32 micro-batches: 0.02, 0.28, 0.42% of the steps with 2 workers, 0.59, 0.70, 0.88% with 3
# (where the odd ones may go to anybody), 0.00, 0.06, 0.60% with 4; at most 1.5% at 20% noise. Lost: at most 0.2%.
@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize(("noise", "most_changes", "num_runs"), [(0.05, 0.01, 1), (0.1, 0.01, 6), (0.2, 0.02, 1)])
def test_equal_devices_keep_equal_shares(num_workers: int, noise: float, most_changes: float, num_runs: int) -> None:
    nums = [8, 16, 32]
    runs = [long_run([1.0] * num_workers, [noise] * num_workers, nums, seed) for seed in range(num_runs)]
    for num in nums:
        assert sum(run[num][0] for run in runs) / num_runs < most_changes
        assert all(run[num][1] < 0.01 for run in runs)


# 0.4% of the steps, 0.1% lost.
def test_unequal_devices_reach_the_ideal() -> None:
    for seed in range(3):
        changes, lost = long_run([1.0, 2.5], [0.05, 0.15], [32], seed)[32]
        assert changes < 0.015
        assert lost < 0.01


def lasting_noise(num_workers: int, seed: int, num_steps: int = 2000) -> float:
    """Shares of 32 that changed, where half of a step's noise of 10% carries over to the next step."""
    draw, balancer = random.Random(seed), Balancer(num_workers)
    state = [draw.gauss(0, 1) for _ in range(num_workers)]
    counts, changes = balancer.shares(32), 0
    for _ in range(num_steps):
        state = [0.5 * value + math.sqrt(0.75) * draw.gauss(0, 1) for value in state]
        balancer.observe([math.exp(0.1 * value) for value in state])
        before, counts = counts, balancer.shares(32)
        changes += counts != before
    return changes / num_steps


# 0.5%; without the covariance 10%.
def test_lasting_noise_makes_no_flutter_either() -> None:
    assert sum(lasting_noise(2, seed) for seed in range(3)) / 3 < 0.01


def is_followed(speed: float, seed: int, num_steps: int = 6, noise: float = 0.1, before: int = 60) -> list[bool]:
    """Whether shares of 32 are within 10% of the best ones once six steps ran at a new speed; then back again."""
    draw, balancer, result = random.Random(seed), Balancer(2), []
    for times, length in (([1.0, 1.0], before), ([1.0, 1 / speed], 40), ([1.0, 1.0], num_steps)):
        for step in range(length + 1):
            if step == num_steps:
                best = finishing_time(shares(32, [1 / time for time in times]), times)
                result.append(finishing_time(balancer.shares(32), times) <= 1.1 * best * (1 + 1e-12))
            balancer.observe(noisy(times, [noise, noise], draw))
    return result[1:]


# Of 3,000 runs: 100.0 and 100.0% when cut to 0.4 and restored, 99.9 and 99.9% for 0.7; and 93.1 and 95.2% for 0.8, with
# which the old shares are only 11% off (after 200 steps at the first speed 96.2 and 97.9%, two steps later 98.9 and
# 99.2%): to find such a change earlier takes limits at which noise moves the shares.
@pytest.mark.parametrize(("speed", "least"), [(0.4, 0.99), (0.7, 0.99), (0.8, 0.9)])
def test_a_change_of_speed_is_followed_within_six_steps(speed: float, least: float) -> None:
    runs = [is_followed(speed, seed) for seed in range(200)]
    for direction in range(2):
        assert sum(run[direction] for run in runs) / len(runs) >= least


def test_a_small_change_is_followed_where_noise_is_small() -> None:
    assert all(all(is_followed(0.8, seed, noise=0.05)) for seed in range(100))


# 1.4% lost on average while it lasts, 0.5% later.
def test_a_slow_drift_is_followed() -> None:
    """40% in 500 steps: too slow for six readings to differ much from those before them."""
    lost = []
    for seed in range(10):
        draw, balancer = random.Random(seed), Balancer(2)
        for step in range(700):
            balancer.observe(noisy([1.0, 1 + 0.4 * min(step / 500, 1)], [0.1, 0.1], draw))
        best = finishing_time(shares(32, [1.4, 1.0]), [1.0, 1.4])
        lost.append(finishing_time(balancer.shares(32), [1.0, 1.4]) / best - 1)
    assert sum(lost) / len(lost) < 0.02
