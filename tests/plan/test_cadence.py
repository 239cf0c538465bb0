"""El Che. The literal cases of FEATURES.md row B9 are the tests named `test_b9_...`."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.cadence import ElChe


def sync(el_che: ElChe, ms_per_batch: list[float], sync_ms: float = 0.0) -> ElChe:
    """One sync after the batches that were asked for, at these speeds."""
    counts = el_che.batch_counts
    compute_ms = [ms * count for ms, count in zip(ms_per_batch, counts, strict=True)]
    el_che.report_timing(compute_ms, counts, sync_ms)
    return el_che


def test_b9_defaults() -> None:
    el_che = ElChe(2)
    assert (el_che.anchor, el_che.overhead_target, el_che.max_anchor, el_che.max_batch_diff) == (10, 0.10, 200, None)
    assert el_che.batch_counts == (10, 10)
    assert el_che.total_batches == 20
    assert not el_che.is_calibrated
    assert el_che.anchor_wall_ms == 0.0


def test_b9_500_and_1000_ms_per_batch_give_20_and_10() -> None:
    el_che = sync(ElChe(2), [500.0, 1000.0])
    assert el_che.batch_counts == (20, 10)
    assert el_che.total_batches == 30
    assert el_che.is_calibrated
    assert el_che.anchor_wall_ms == 10_000.0


def test_b9_333_500_and_1000_ms_per_batch_give_30_20_and_10() -> None:
    assert sync(ElChe(3), [333.0, 500.0, 1000.0]).batch_counts == (30, 20, 10)


def test_b9_sync_of_500_ms_on_1000_ms_compute_gives_anchor_50() -> None:
    el_che = sync(ElChe(2), [100.0, 100.0], sync_ms=500.0)
    assert el_che.anchor == 50
    assert el_che.batch_counts == (50, 50)
    assert el_che.anchor_wall_ms == 5000.0


def test_b9_cap_30() -> None:
    assert sync(ElChe(2, max_anchor=30), [100.0, 100.0], sync_ms=500.0).anchor == 30


def test_b9_default_cap_200() -> None:
    assert sync(ElChe(2), [100.0, 100.0], sync_ms=50_000.0).anchor == 200


def test_b9_clamp_total_15_sums_to_15() -> None:
    el_che = sync(ElChe(2), [500.0, 1000.0])
    assert el_che.clamp_total(15) == (10, 5)
    assert el_che.batch_counts == (20, 10)


@pytest.mark.parametrize(
    ("num_batches", "expected"), [(30, (20, 10)), (31, (20, 10)), (29, (20, 9)), (3, (2, 1)), (1, (1, 0)), (0, (0, 0))]
)
def test_clamp_total(num_batches: int, expected: tuple[int, ...]) -> None:
    assert sync(ElChe(2), [500.0, 1000.0]).clamp_total(num_batches) == expected


def test_b9_max_batch_diff_3_bounds_50_to_47() -> None:
    """The lead over the slowest, at the first calibration too."""
    assert sync(ElChe(2, anchor=44), [50.0, 44.0]).batch_counts == (44, 50)
    el_che = sync(ElChe(2, anchor=44, max_batch_diff=3), [50.0, 44.0])
    assert el_che.batch_counts == (44, 47)
    assert sync(el_che, [50.0, 10.0]).batch_counts == (44, 47)
    assert sync(el_che, [50.0, 500.0], sync_ms=None).batch_counts == (47, 44)


def test_a_hint_is_bounded_by_max_batch_diff() -> None:
    assert ElChe(3, max_batch_diff=3, speed_hint=(1, 2.3)).batch_counts == (13, 10, 13)


def test_b9_nudge_by_half_40_20_gives_20_10() -> None:
    el_che = sync(ElChe(2, anchor=20), [500.0, 1000.0])
    assert el_che.batch_counts == (40, 20)
    el_che.nudge_anchor_down(0.5)
    assert (el_che.anchor, el_che.batch_counts) == (10, (20, 10))


def test_b9_nudge_floor_1() -> None:
    el_che = sync(ElChe(2), [500.0, 1000.0])
    for _ in range(9):
        el_che.nudge_anchor_down(0.5)
    assert (el_che.anchor, el_che.batch_counts) == (1, (2, 1))


def test_b9_hint_2_3_gives_23_10() -> None:
    el_che = ElChe(2, speed_hint=(1, 2.3))
    assert el_che.batch_counts == (23, 10)
    assert not el_che.is_calibrated


def test_b9_wrong_hint_corrects_itself_at_the_first_sync() -> None:
    el_che = ElChe(2, speed_hint=(1, 3.0))
    assert el_che.batch_counts == (30, 10)
    assert sync(el_che, [1000.0, 500.0]).batch_counts == (10, 20)


def test_b9_overhead_target_is_clamped_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"overhead_target=0.001 is out of range and counts as 0.01: choose 0.01 to"):
        assert ElChe(2, overhead_target=0.001).overhead_target == 0.01
    with pytest.warns(UserWarning, match=r"overhead_target=2.0 is out of range and counts as 0.5"):
        assert ElChe(2, overhead_target=2.0).overhead_target == 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [ElChe(2, overhead_target=target).overhead_target for target in (0.01, 0.2, 0.5)] == [0.01, 0.2, 0.5]


def test_b9_hint_ratio_below_1_counts_as_1_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"the speed hint's ratio=0.5 counts as 1"):
        assert ElChe(2, speed_hint=(0, 0.5)).batch_counts == (10, 10)


@pytest.mark.parametrize("slow_rank", [-1, 2])
def test_b9_hint_for_a_rank_that_does_not_exist(slow_rank: int) -> None:
    message = rf"the speed hint's slow_rank={slow_rank} is not in a world of 2: choose 0 <= slow_rank < 2"
    with pytest.raises(ValueError, match=message):
        ElChe(2, speed_hint=(slow_rank, 2.0))


@pytest.mark.parametrize(("max_anchor", "anchor"), [(1, 1), (4, 4), (10, 10), (30, 10)])
def test_max_anchor_caps_the_initial_anchor(max_anchor: int, anchor: int) -> None:
    assert ElChe(2, max_anchor=max_anchor).anchor == anchor


def test_anchor_fixed_at_n() -> None:
    """Row B10: `max_anchor=n` fixes it, where the initial anchor is n too."""
    el_che = ElChe(2, anchor=7, max_anchor=7)
    assert [sync(el_che, [100.0, 200.0], sync_ms).anchor for sync_ms in (0.0, 1e6, 0.0, 0.0)] == [7, 7, 7, 7]


def test_cheap_syncs_shrink_the_anchor_by_one_down_to_the_initial_one() -> None:
    el_che = sync(ElChe(2), [100.0, 100.0], sync_ms=130.0)
    assert el_che.anchor == 13
    # Under half the target of 0.1 the anchor shrinks, from there up to the target it stays.
    assert [sync(el_che, [100.0, 100.0], sync_ms).anchor for sync_ms in (130.0, 66.0, 64.0, 1.0, 1.0, 1.0)] == [
        13,
        13,
        12,
        11,
        10,
        10,
    ]


def test_the_overhead_of_an_interval_cut_short_is_that_of_a_whole_one() -> None:
    """An epoch's tail: one batch of 100 ms and a sync of 90 ms do not mean that syncs cost 90%."""
    el_che = sync(ElChe(2), [100.0, 100.0])
    el_che.report_timing([100.0, 100.0], [1, 1], 90.0)
    assert el_che.anchor == 10


def test_the_anchor_grows_by_one_per_sync_after_a_nudge() -> None:
    """Else a dear sync would undo the nudge at once."""
    el_che = sync(ElChe(2), [100.0, 100.0], sync_ms=500.0)
    el_che.nudge_anchor_down(0.5)
    assert el_che.anchor == 25
    assert [sync(el_che, [100.0, 100.0], 500.0).anchor for _ in range(3)] == [26, 27, 28]


def test_a_nudge_below_the_initial_anchor_lasts_while_syncs_are_cheap() -> None:
    el_che = sync(ElChe(2), [100.0, 100.0], sync_ms=60.0)
    el_che.nudge_anchor_down(0.5)
    assert [sync(el_che, [100.0, 100.0], 30.0).anchor for _ in range(3)] == [5, 5, 5]


def test_a_nudge_keeps_the_hint() -> None:
    el_che = ElChe(2, anchor=20, speed_hint=(0, 2.0))
    el_che.nudge_anchor_down(0.5)
    assert el_che.batch_counts == (10, 20)


@pytest.mark.parametrize(
    ("ms_per_batch", "expected"),
    [
        pytest.param([950.0, 1000.0], (10, 10), id="a move of 10% or less"),
        pytest.param([500.0, 1000.0], (11, 10), id="more than 10%"),
    ],
)
def test_counts_move_only_by_more_than_a_tenth(ms_per_batch: list[float], expected: tuple[int, ...]) -> None:
    el_che = sync(ElChe(2, max_batch_diff=1), [1000.0, 1000.0])
    assert sync(el_che, ms_per_batch).batch_counts == expected


def test_counts_move_together() -> None:
    """One count moves by more than a tenth, and the others, which would not by themselves, go along."""
    el_che = sync(ElChe(3, anchor=100), [1000.0, 500.0, 250.0])
    assert el_che.batch_counts == (100, 200, 400)
    assert sync(el_che, [1000.0, 450.0, 250.0]).batch_counts == (100, 200, 400)
    assert sync(el_che, [1000.0, 450.0, 150.0]).batch_counts == (100, 204, 476)


def test_a_jump_in_speed_is_followed_by_the_second_sync() -> None:
    el_che = sync(ElChe(2), [1000.0, 1000.0])
    for _ in range(2):
        sync(el_che, [1000.0, 400.0])
    assert el_che.batch_counts == (10, 25)
    for _ in range(2):
        sync(el_che, [1000.0, 1000.0])
    assert el_che.batch_counts == (10, 11)


def test_a_worker_without_a_batch_gives_no_reading() -> None:
    el_che = ElChe(2)
    el_che.report_timing([1000.0, 0.0], [10, 0], 5.0)
    assert not el_che.is_calibrated
    assert el_che.batch_counts == (10, 10)
    el_che.report_timing([1000.0, 2000.0], [10, 10], 5.0)
    assert el_che.batch_counts == (20, 10)
    el_che.report_timing([1000.0, 0.0], [10, 0], 5000.0)
    assert (el_che.anchor, el_che.batch_counts) == (10, (20, 10)), "no overhead without the slowest worker's time"


def test_one_worker() -> None:
    assert sync(ElChe(1), [100.0], sync_ms=500.0).batch_counts == (50,)


ms_per_batch = st.floats(0.1, 1e4)
reports = st.lists(
    st.tuples(st.lists(ms_per_batch, min_size=3, max_size=3), st.floats(0, 1e5)), min_size=1, max_size=12
)


@given(reports, st.integers(1, 50), st.integers(1, 300), st.none() | st.integers(1, 40), st.integers(0, 300))
def test_limits_hold(
    syncs: list[tuple[list[float], float]],
    anchor: int,
    max_anchor: int,
    max_batch_diff: int | None,
    num_left: int,
) -> None:
    el_che = ElChe(3, anchor, max_anchor=max_anchor, max_batch_diff=max_batch_diff)
    for ms, sync_ms in syncs:
        sync(el_che, ms, sync_ms)
        assert min(anchor, max_anchor) <= el_che.anchor <= max_anchor
        assert min(el_che.batch_counts) >= 1
        if max_batch_diff is not None:
            assert max(el_che.batch_counts) - min(el_che.batch_counts) <= max_batch_diff
        assert sum(el_che.clamp_total(num_left)) == min(num_left, el_che.total_batches)


@given(st.lists(ms_per_batch, min_size=2, max_size=6), st.integers(1, 100))
def test_first_calibration_finishes_together(ms: list[float], anchor: int) -> None:
    """Within half a batch of each worker; the slowest does `anchor`, and the faster the more."""
    el_che = sync(ElChe(len(ms), anchor), ms)
    assert el_che.batch_counts[ms.index(max(ms))] == anchor
    assert el_che.anchor_wall_ms == pytest.approx(anchor * max(ms))
    for own, count in zip(ms, el_che.batch_counts, strict=True):
        assert abs(own * count - el_che.anchor_wall_ms) <= own * 0.5 * (1 + 1e-9)
    by_speed = [count for _, count in sorted(zip(ms, el_che.batch_counts, strict=True))]
    assert by_speed == sorted(by_speed, reverse=True)


@given(st.floats(1.0, 5e4), st.floats(0.01, 0.5), ms_per_batch)
def test_the_anchor_reaches_the_target_in_one_sync(sync_ms: float, target: float, ms: float) -> None:
    el_che = sync(ElChe(2, 1, overhead_target=target, max_anchor=10**9), [ms, ms], sync_ms)
    assert sync_ms / el_che.anchor_wall_ms <= target * (1 + 1e-9)
    if el_che.anchor > 1:
        assert sync_ms / ((el_che.anchor - 1) * ms) > target * (1 - 1e-9)


@given(reports, st.data())
def test_state_round_trip(syncs: list[tuple[list[float], float]], data: st.DataObject) -> None:
    el_che = ElChe(3, max_batch_diff=5, speed_hint=(2, 1.5), overhead_target=0.2, max_anchor=60)
    number = data.draw(st.integers(0, len(syncs)))
    for ms, sync_ms in syncs[:number]:
        sync(el_che, ms, sync_ms)
    if data.draw(st.booleans()):
        el_che.nudge_anchor_down(0.5)
    again = ElChe.from_dict(json.loads(json.dumps(el_che.to_dict())))
    assert again.to_dict() == el_che.to_dict()
    for ms, sync_ms in syncs[number:]:
        assert sync(again, ms, sync_ms).to_dict() == sync(el_che, ms, sync_ms).to_dict()


def test_resume_with_another_knob() -> None:
    el_che = sync(ElChe(2), [100.0, 100.0], sync_ms=500.0)
    assert ElChe.from_dict(el_che.to_dict() | {"overhead_target": 0.2}).overhead_target == 0.2
    assert ElChe.from_dict(el_che.to_dict() | {"max_anchor": 30}).anchor == 30


@pytest.mark.parametrize(
    ("settings", "anchor"),
    [({}, 7), ({"anchor": 6}, 6), ({"max_anchor": 5}, 5), ({"overhead_target": 0.2}, 5), ({"max_batch_diff": 9}, 5)],
)
def test_a_saved_state_counts_for_the_same_settings_only(settings: dict[str, Any], anchor: int) -> None:
    saved = ElChe(2, 5)
    saved.report_timing([50.0, 50.0], [5, 5], 7.0)
    assert saved.anchor == 7
    assert ElChe(2, **({"anchor": 5} | settings)).resumed(saved.to_dict()).anchor == anchor


def test_a_clamped_hint_warns_only_once() -> None:
    with pytest.warns(UserWarning, match="counts as 1"):
        state = ElChe(2, speed_hint=(0, 0.5)).to_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ElChe.from_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers=0 is not a positive integer: choose num_workers >= 1"),
        ({"anchor": 0}, "anchor=0 is not a positive integer"),
        ({"anchor": 1.5}, "anchor=1.5 is not a positive integer"),
        ({"max_anchor": -1}, "max_anchor=-1 is not a positive integer"),
        ({"max_batch_diff": 0}, "max_batch_diff=0 is not a positive integer"),
        ({"overhead_target": 0.0}, "overhead_target=0.0 is not a part of compute time: choose 0.01 to 0.5"),
        ({"overhead_target": math.nan}, "overhead_target=nan is not a part of compute time"),
        ({"speed_hint": (0, math.nan)}, "the speed hint's ratio=nan is not a ratio of speeds"),
        ({"speed_hint": (0, -2.0)}, "the speed hint's ratio=-2.0 is not a ratio of speeds: choose a finite number >="),
    ],
)
def test_bad_knobs(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElChe(**({"num_workers": 2} | arguments))


@pytest.mark.parametrize(
    ("compute_ms", "batches", "sync_ms", "message"),
    [
        ([1.0], [10, 10], 1.0, "1 compute times and 2 batch counts for 2 workers: give one of each per worker"),
        ([1.0, 1.0], [10], 1.0, "2 compute times and 1 batch counts for 2 workers"),
        ([1.0, math.nan], [10, 10], 1.0, "worker 1 reports nan ms for 10 batches"),
        ([1.0, -1.0], [10, 10], 1.0, "worker 1 reports -1.0 ms for 10 batches: give a time > 0 for batches > 0"),
        ([0.0, 1.0], [10, 10], 1.0, "worker 0 reports 0.0 ms for 10 batches"),
        ([1.0, 1.0], [10, 0], 1.0, "worker 1 reports 1.0 ms for 0 batches"),
        ([1.0, 1.0], [10, 10], -1.0, "sync_ms=-1.0 is not a time: give milliseconds >= 0"),
    ],
)
def test_bad_report_changes_nothing(compute_ms: list[float], batches: list[int], sync_ms: float, message: str) -> None:
    el_che = ElChe(2)
    with pytest.raises(ValueError, match=message):
        el_che.report_timing(compute_ms, batches, sync_ms)
    assert el_che.to_dict() == ElChe(2).to_dict()


@pytest.mark.parametrize("factor", [0.0, 1.0, -0.5, math.nan])
def test_bad_nudge(factor: float) -> None:
    with pytest.raises(ValueError, match="does not shrink the anchor: choose 0 < factor < 1"):
        ElChe(2).nudge_anchor_down(factor)


def test_bad_clamp() -> None:
    with pytest.raises(ValueError, match="num_batches=-1 is negative: choose num_batches >= 0"):
        ElChe(2).clamp_total(-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "El Che's state has unknown rank: it takes only num_workers, initial_anchor"),
        ({"anchor": 0}, "anchor=0 is not a positive integer"),
        ({"ceiling": None}, "ceiling=None is not a positive integer"),
        ({"batch_counts": [10]}, r"El Che's batch_counts=\[10\] is not a list of one entry for each of 2 workers"),
        ({"batch_counts": None}, "El Che's batch_counts=None is not a list"),
        ({"batch_counts": [10, 0]}, "batch count=0 is not a positive integer"),
        (
            {"ms_per_batch": [None] * 3},
            r"El Che's ms_per_batch=\[None, None, None\] is not a list of one entry for each",
        ),
        ({"ms_per_batch": [None, {"value": 1.0}]}, "a smoothed time lacks was_off: it needs value, was_off"),
        ({"num_workers": 3}, r"El Che's batch_counts=\[10, 10\] is not a list of one entry for each of 3 workers"),
        ({"overhead_target": None}, "overhead_target=None is not a part of compute time"),
        ({"speed_hint": [1]}, r"El Che's speed_hint=\[1\] is not null or a rank and a ratio"),
    ],
)
def test_bad_state(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElChe.from_dict(ElChe(2).to_dict() | changes)


@pytest.mark.parametrize("name", sorted(ElChe(2).to_dict()))
def test_incomplete_state(name: str) -> None:
    values = ElChe(2).to_dict()
    del values[name]
    with pytest.raises(ValueError, match=f"El Che's state lacks {name}: it needs"):
        ElChe.from_dict(values)
