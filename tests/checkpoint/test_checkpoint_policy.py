"""When to save and which checkpoints to keep: literal tables, and properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.policy import Progress, Retention, SavedStep, Schedule, steps_to_delete

NAN, INF = math.nan, math.inf

# metrics of steps 1, 2, ...; the rules; the steps that stay
TABLE: list[tuple[list[float | None], dict[str, Any], list[int]]] = [
    ([None] * 5, {}, [1, 2, 3, 4, 5]),
    ([None] * 5, {"last": 2}, [4, 5]),
    ([None] * 5, {"last": 1}, [5]),
    ([None] * 5, {"last": 9}, [1, 2, 3, 4, 5]),
    ([], {"last": 2}, []),
    ([3, 2, 2.5, 2.2, 2.1], {"best": 2, "metric": "loss"}, [2, 5]),
    ([3, 2, 2.5, 2.2, 2.1], {"best": 2, "metric": "loss", "mode": "max"}, [1, 3, 5]),
    ([3, 2, 2.5, 2.2, 9], {"best": 2, "metric": "loss"}, [2, 4, 5]),
    ([3, 2, 2.5, 2.2, 2.1], {"best": 1, "metric": "loss", "last": 2}, [2, 4, 5]),
    ([1, 1, 1, 5, 5], {"best": 2, "metric": "loss"}, [2, 3, 5]),
    ([NAN, 2, NAN, 3, 4], {"best": 2, "metric": "loss"}, [2, 4, 5]),
    ([NAN, 2, NAN, None, 4], {"best": 3, "metric": "loss"}, [2, 3, 5]),
    ([NAN, -1, NAN, INF, 4], {"best": 2, "metric": "loss", "mode": "max"}, [4, 5]),
    ([NAN, -INF, INF, 5], {"best": 2, "metric": "loss", "mode": "max"}, [3, 4]),
    ([NAN, INF, 9, 9], {"best": 3, "metric": "loss"}, [2, 3, 4]),
    ([None] * 6, {"every": 2}, [2, 4, 6]),
    ([None] * 7, {"every": 3, "last": 1}, [3, 6, 7]),
    ([1, 9, 9, 9, 9, 9], {"every": 4, "last": 1, "best": 1, "metric": "loss"}, [1, 4, 6]),
]


@pytest.mark.parametrize(("metrics", "rules", "stay"), TABLE)
def test_what_stays(metrics: list[float | None], rules: dict[str, Any], stay: list[int]) -> None:
    saved = [SavedStep(step, metric) for step, metric in enumerate(metrics, 1)]
    gone = steps_to_delete(saved, len(saved), Retention(**rules))
    assert [found.step for found in saved if found.step not in gone] == stay


def test_rotation_step_by_step_keeps_the_best_two() -> None:
    here: list[SavedStep] = []
    for step, metric in enumerate([3, 2, 2.5, 2.2, 2.1], 1):
        here.append(SavedStep(step, metric))
        gone = steps_to_delete(here, step, Retention(best=2, metric="loss"))
        here = [found for found in here if found.step not in gone]
    assert [found.metric for found in here] == [2, 2.1]


def test_the_one_just_written_stays_even_below_others() -> None:
    saved = [SavedStep(step) for step in (2, 5, 7, 9)]
    assert steps_to_delete(saved, 2, Retention(last=1)) == [5, 7]


def test_a_damaged_checkpoint_counts_for_nothing_and_is_left_to_the_user() -> None:
    saved = [SavedStep(1), SavedStep(2), SavedStep(3, is_intact=False), SavedStep(4, is_intact=False)]
    assert steps_to_delete(saved, 4, Retention(last=1)) == [1]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"last": 0}, "last=0 is not a positive integer: choose last >= 1 or None"),
        ({"every": 1.5}, "every=1.5 is not"),
        ({"best": True, "metric": "a"}, "best=True is not"),
        ({"best": 2}, "best=2 and metric=None: give both or neither"),
        ({"metric": "loss"}, "best=None and metric='loss'"),
        ({"mode": "low"}, "mode='low': choose 'min' or 'max'"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Retention(**rules)


checkpoints = st.lists(
    st.builds(SavedStep, st.integers(0, 50), st.none() | st.floats(), st.booleans()),
    min_size=1,
    unique_by=lambda found: found.step,
)
counts = st.none() | st.integers(1, 6)


@given(checkpoints, counts, counts, counts, st.sampled_from(["min", "max"]), st.data())
def test_what_always_holds(saved: Any, last: Any, best: Any, every: Any, mode: Any, data: st.DataObject) -> None:
    keep = Retention(last, best, None if best is None else "loss", mode, every)
    just_written = data.draw(st.sampled_from([found.step for found in saved]))
    gone = steps_to_delete(saved, just_written, keep)
    intact = {found.step: found.metric for found in saved if found.is_intact}
    assert gone == sorted(set(gone) & set(intact))
    assert just_written not in gone
    assert max(intact, default=None) not in gone or not intact
    assert len(intact) - len(gone) >= min(len(intact), max(last or 0, 1))
    if every is not None:
        assert not any(step % every == 0 for step in gone)
    if best is not None:
        sign = 1 if mode == "min" else -1
        stay = [sign * intact[s] for s in intact if s not in gone and intact[s] is not None]
        for step in gone:
            if intact[step] is not None and not math.isnan(intact[step]):
                assert sum(value <= sign * intact[step] for value in stay) >= best


# Schedules


START = Progress(0, 0, 0.0)


def saves(schedule: Schedule, times: list[Progress], last: Progress = START) -> list[int]:
    """The steps at which a run that goes through these times saves."""
    steps = []
    for now in times:
        if schedule.is_due_by_count(now, last) or schedule.is_due_by_clock(now.seconds, last):
            steps.append(now.step)
            last = now
    if schedule.is_due_at_end(times[-1], last):
        steps.append(times[-1].step)
    return steps


# Ten steps of 20 s, four to an epoch.
TIMES = [Progress(step, step // 4, 20.0 * step) for step in range(1, 11)]

SCHEDULES: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [10]),
    ({"final": False}, []),
    ({"every_steps": 3}, [3, 6, 9, 10]),
    ({"every_steps": 5}, [5, 10]),
    ({"every_steps": 3, "final": False}, [3, 6, 9]),
    ({"every_epochs": 1, "final": False}, [4, 8]),
    ({"every_epochs": 2}, [8, 10]),
    ({"every_minutes": 1, "final": False}, [3, 6, 9]),
    ({"every_minutes": 1.1, "final": False}, [4, 8]),
    ({"every_steps": 4, "every_minutes": 1, "final": False}, [3, 4, 7, 8]),
    ({"every_steps": 5, "every_epochs": 1, "final": False}, [4, 5, 8, 10]),
]


@pytest.mark.parametrize(("rules", "expected"), SCHEDULES)
def test_when_a_run_saves(rules: dict[str, Any], expected: list[int]) -> None:
    assert saves(Schedule(**rules), TIMES) == expected


def test_a_resumed_run_saves_where_it_would_have() -> None:
    schedule = Schedule(every_steps=4, every_epochs=2, final=False)
    assert saves(schedule, TIMES) == [4, 8]
    assert saves(schedule, TIMES[5:], last=Progress(5, 1, 0.0)) == [8]


def test_nothing_new_is_not_saved_at_the_end() -> None:
    assert not Schedule().is_due_at_end(Progress(7, 1, 9.0), Progress(7, 1, 0.0))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"every_steps": 0}, "every_steps=0 is not a positive integer"),
        ({"every_epochs": 0.5}, "every_epochs=0.5 is not a positive integer"),
        ({"every_minutes": 0}, "every_minutes=0 must be > 0"),
        ({"every_minutes": float("nan")}, "every_minutes=nan must be > 0"),
    ],
)
def test_schedules_that_cannot_be_meant_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**rules)
