"""When the measured shares are looked at: every step that takes its time, and some of those that do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.timing import Timing
from paceline.plan.balance import Balancer
from paceline.plan.cadence import ElChe
from paceline.run.step.planner import MAX_UNSEEN, OBSERVE_EVERY_S, CadencePlanner, FixedPlanner, MeasuringPlanner


class CountingBalancer(Balancer):
    """Counts what it is told and asked."""

    def __init__(self) -> None:
        super().__init__(2)
        self.num_told = self.num_asked = 0

    def observe(self, *readings: Any) -> None:
        self.num_told += 1
        super().observe(*readings)

    def shares(self, num_micro_batches: int) -> tuple[int, ...]:
        self.num_asked += 1
        return super().shares(num_micro_batches)


def taken(step_s: float, num_steps: int, slowness: float = 3.0) -> tuple[MeasuringPlanner, CountingBalancer]:
    """Steps of 8 micro-batches, of which those of the second worker take `slowness` times as long."""
    balancer = CountingBalancer()
    planner = MeasuringPlanner(8, 2)
    planner._balancer = balancer
    for _ in range(num_steps):
        plan = planner.plan(100)
        one_s = step_s / len(plan[0])
        numbers: Any = SimpleNamespace(timings=[Timing(one_s, 0.0, 0.0), Timing(slowness * one_s, 0.0, 0.0)])
        planner.observe(plan, numbers)
    return planner, balancer


@pytest.mark.parametrize(
    ("step_s", "num_steps", "num_told"),
    [(OBSERVE_EVERY_S, 20, 20), (1.0, 20, 20), (OBSERVE_EVERY_S / 3.9, 20, 5), (1e-9, 5 * MAX_UNSEEN, 5)],
)
def test_short_steps_are_looked_at_now_and_then(step_s: float, num_steps: int, num_told: int) -> None:
    planner, balancer = taken(step_s, num_steps)
    assert balancer.num_told == num_told
    assert balancer.num_asked <= num_told + 1
    assert [len(own) for own in planner.plan(100)] == [6, 2]


def test_a_smaller_step_has_a_plan_of_its_own() -> None:
    planner, _ = taken(1.0, 5)
    assert [sum(map(len, planner.plan(size))) for size in (100, 3, 8, 1)] == [8, 3, 8, 1]


def test_what_was_learned_counts_at_once_when_it_is_loaded() -> None:
    learned, _ = taken(1.0, 20)
    planner = MeasuringPlanner(8, 2)
    assert [len(own) for own in planner.plan(8)] == [4, 4]
    planner.load_state_dict(learned.state_dict())
    assert [len(own) for own in planner.plan(8)] == [6, 2]


def test_the_speeds_of_those_who_are_left_are_kept_when_workers_change() -> None:
    """A newcomer is taken for an average worker."""
    learned, _ = taken(1.0, 20)
    for previous_ranks, shares in (((1,), [8]), ((1, 0), [2, 6]), ((0, 1, None), [4, 1, 3])):
        planner = MeasuringPlanner(8, 2)
        planner.regroup(learned.handover(), previous_ranks)
        assert [len(own) for own in planner.plan(8)] == shares, previous_ranks
    fixed = FixedPlanner(8, [3.0, 1.0])
    fixed.regroup(fixed.handover(), (1, None, 0))
    assert [len(own) for own in fixed.plan(8)] == [1, 3, 4]


def shares_of(planner: MeasuringPlanner, step_size: int, step_s: float, slowness: float, num_steps: int) -> list[int]:
    """The second worker's share of each step; a micro-batch of the first takes 1 / step_size of `step_s`."""
    found = []
    for _ in range(num_steps):
        plan = planner.plan(100)
        one_s = step_s / step_size
        numbers: Any = SimpleNamespace(
            timings=[Timing(len(own) and one_s * s) for own, s in zip(plan, (1, slowness), strict=True)]
        )
        planner.observe(plan, numbers)
        found.append(len(plan[1]))
    return found


@pytest.mark.parametrize("step_s", [1.0, OBSERVE_EVERY_S / 4, 1e-6])
def test_a_worker_without_a_share_gets_a_micro_batch_in_ten_steps_however_short_they_are(step_s: float) -> None:
    found = shares_of(MeasuringPlanner(2, 2), 2, step_s, 30.0, 60)
    assert found[1:] == [0] * 8 + ([1] + [0] * 9) * 5 + [1]


def test_the_step_of_such_a_turn_is_measured_so_that_a_recovered_worker_is_noticed() -> None:
    planner = MeasuringPlanner(2, 2)
    shares_of(planner, 2, 1e-6, 30.0, 60)
    assert shares_of(planner, 2, 1e-6, 1.0, 60)[-10:] == [1] * 10


def test_the_schedule_of_flodl_uses_what_was_measured_after_10_steps_and_then_every_50() -> None:
    planner = MeasuringPlanner(8, 2, None, (10, 50))
    assert shares_of(planner, 8, 1.0, 3.0, 10) == [4] * 10
    assert shares_of(planner, 8, 1.0, 7.0, 50) == [2] * 50  # as measured in the first ten
    assert shares_of(planner, 8, 1.0, 7.0, 50) == [1] * 50


@pytest.mark.parametrize(("anchor", "counts"), [(5, [7, 7]), (9, [9, 9])])
def test_a_resumed_cadence_has_its_own_settings(anchor: int, counts: list[int]) -> None:
    """What was learned counts only for the settings with which it was learned."""
    saved = ElChe(2, 5)
    saved.report_timing([50.0, 50.0], [5, 5], 7.0)
    planner = CadencePlanner(ElChe(2, anchor), 1000)
    planner.load_state_dict(CadencePlanner(saved, 1000).state_dict())
    assert [len(own) for own in planner.plan(1000)] == counts
