"""When a save is due."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.checkpoint.schedule import Moment, Schedule

START = Moment(0, 0, 0.0)


def saves(schedule: Schedule, moments: list[Moment], last: Moment = START) -> list[int]:
    """The steps at which a run that goes through these moments saves."""
    steps = []
    for now in moments:
        if schedule.is_due_by_count(now, last) or schedule.is_due_by_clock(now, last):
            steps.append(now.step)
            last = now
    if schedule.is_due_at_end(moments[-1], last):
        steps.append(moments[-1].step)
    return steps


# Ten steps of 20 s, four to an epoch.
MOMENTS = [Moment(step, step // 4, 20.0 * step) for step in range(1, 11)]

TABLE: list[tuple[dict[str, Any], list[int]]] = [
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


@pytest.mark.parametrize(("rules", "expected"), TABLE)
def test_when_a_run_saves(rules: dict[str, Any], expected: list[int]) -> None:
    assert saves(Schedule(**rules), MOMENTS) == expected


def test_a_resumed_run_saves_where_it_would_have() -> None:
    schedule = Schedule(every_steps=4, every_epochs=2, final=False)
    assert saves(schedule, MOMENTS) == [4, 8]
    assert saves(schedule, MOMENTS[5:], last=Moment(5, 1, 0.0)) == [8]


def test_nothing_new_is_not_saved_at_the_end() -> None:
    assert not Schedule().is_due_at_end(Moment(7, 1, 9.0), Moment(7, 1, 0.0))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"every_steps": 0}, "every_steps=0 is not a positive integer"),
        ({"every_epochs": 0.5}, "every_epochs=0.5 is not a positive integer"),
        ({"every_minutes": 0}, "every_minutes=0 is no time: choose minutes > 0"),
        ({"every_minutes": float("nan")}, "every_minutes=nan is no time"),
    ],
)
def test_schedules_that_cannot_be_meant_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**rules)
