"""Simulated runs behave as runs do: shares follow speeds, a death costs a step, newcomers are taken in."""

from __future__ import annotations

import pytest

from paceline.plan.cadence import Cadence
from paceline.plan.predict import Averaging, Device, Hardware, Host, Workload, predict
from paceline.run.simulation import CHANGE_S, RECOVERY_S, Scenario, Simulation

FAST, SLOW = Device("fast", 0.1, 0.01), Device("slow", 0.25, 0.01)
WORK = Workload(28, 4, 1e6)


def test_without_noise_a_run_is_as_fast_as_predicted() -> None:
    outcome = Simulation(WORK, [FAST, SLOW], Scenario(600, noise=0.0)).run()
    assert outcome.last_shares == predict(WORK, [FAST, SLOW]).shares == (20, 8)
    assert outcome.samples_per_s == pytest.approx(predict(WORK, [FAST, SLOW]).samples_per_s, rel=0.01)
    assert (outcome.deaths, outcome.wasted_s) == (0, 0)


def test_noise_costs_speed() -> None:
    quiet, noisy = (Simulation(WORK, [FAST] * 8, Scenario(600, noise=noise)).run() for noise in (0.0, 0.1))
    assert noisy.samples_per_s < 0.95 * quiet.samples_per_s


def test_a_death_costs_the_step_and_the_recovery() -> None:
    step_s = predict(WORK, [FAST, FAST]).step_s
    begun_s = 200 * step_s
    trace = [(begun_s + 0.3, 1, "die")]
    outcome = Simulation(WORK, [FAST, FAST], Scenario(600, noise=0.0, trace=trace)).run()
    assert (outcome.deaths, outcome.generations, outcome.size_by_step[-1]) == (1, 1, 1)
    assert outcome.last_shares == (28,)
    assert outcome.wasted_s == pytest.approx(1.4 + 0.3)  # the survivor's share, and what the other had done of its own
    # The survivor computes its share of 14, notices, and begins a step of its own.
    assert outcome.recoveries_s == [pytest.approx(1.4 - 0.3 + RECOVERY_S + predict(WORK, [FAST]).step_s)]


def test_survivors_have_the_cores_of_a_dead_worker() -> None:
    on_cpu, host = Device("cpu", 0.1, cores=1), Hardware({"": Host(cores=1)})
    step_s = predict(WORK, [on_cpu, on_cpu], host).step_s
    assert step_s == pytest.approx(2.8)  # 14 micro-batches each, on half of a core
    trace = [(200 * step_s + 0.8, 1, "die")]
    outcome = Simulation(WORK, [on_cpu, on_cpu], Scenario(900, noise=0.0, trace=trace), host).run()
    # The survivor has 10 of its 14 micro-batches left, and a core to itself.
    assert outcome.recoveries_s == [pytest.approx(1.0 + RECOVERY_S + predict(WORK, [on_cpu], host).step_s)]


def test_a_preempted_worker_repeats_nothing_and_its_replacement_joins() -> None:
    trace = [(100.0, 0, "leave"), (200.0, 0, "join")]
    outcome = Simulation(WORK, [FAST, SLOW, FAST], Scenario(300, noise=0.0, trace=trace)).run()
    assert (outcome.wasted_s, outcome.leaves, outcome.joins, outcome.generations) == (0, 1, 1, 2)
    assert set(outcome.size_by_step) == {2, 3}
    assert outcome.size_by_step[-1] == 3
    assert outcome.last_shares == predict(WORK, [SLOW, FAST, FAST]).shares or sorted(outcome.last_shares) == sorted(
        predict(WORK, [FAST, SLOW, FAST]).shares
    )


def test_a_worker_that_was_away_dies_when_the_trace_says() -> None:
    trace = [(60.0, 1, "leave"), (80.0, 1, "die"), (120.0, 1, "join"), (300.0, 1, "die")]
    outcome = Simulation(WORK, [FAST, FAST], Scenario(400, noise=0.0, trace=trace)).run()
    assert (outcome.leaves, outcome.joins, outcome.deaths) == (1, 1, 1)  # at 80 s there is nobody to die
    assert outcome.size_by_step[-1] == 1


def test_leaving_and_joining_makes_no_worker_die_more_often() -> None:
    comings = [(20.0 * turn + wait, 1, what) for turn in range(180) for wait, what in ((5.0, "leave"), (10.0, "join"))]
    scenario = Scenario(3600, failures_per_hour=2, replace_after_s=1, trace=comings)
    assert Simulation(WORK, [FAST, FAST], scenario).run().deaths == pytest.approx(4, abs=6)


def test_dead_workers_are_replaced() -> None:
    scenario = Scenario(3600, failures_per_hour=2, replace_after_s=60, seed=1)
    outcome = Simulation(WORK, [FAST] * 8, scenario).run()
    assert outcome.deaths == pytest.approx(16, abs=12)
    assert outcome.deaths - 1 <= outcome.joins + sum(size < 8 for size in outcome.size_by_step[-40:])
    assert outcome.seconds - 3600 < 60
    assert len(outcome.recoveries_s) >= outcome.deaths - 2
    same = Simulation(WORK, [FAST] * 8, scenario).run()
    assert same == outcome  # a function of the seed


def test_a_run_ends_with_its_last_worker() -> None:
    outcome = Simulation(WORK, [FAST], Scenario(600, noise=0.0, trace=[(10.0, 0, "die")])).run()
    assert outcome.seconds == pytest.approx(10 + RECOVERY_S)


def test_a_cadence_is_simulated_by_its_own_planner() -> None:
    work = Workload(1, 4, 1e6, strategy=Cadence(anchor=5))
    outcome = Simulation(work, [FAST, SLOW], Scenario(200, noise=0.0)).run()
    assert outcome.last_shares == predict(work, [FAST, SLOW]).shares == (12, 5)


def test_bad_scenarios() -> None:
    with pytest.raises(ValueError, match="averaging is not simulated"):
        Simulation(Workload(4, 4, 0, strategy=Averaging()), [FAST], Scenario(1))
    with pytest.raises(ValueError, match="the trace names worker 2: there are 2, counted from 0"):
        Simulation(WORK, [FAST, FAST], Scenario(1, trace=[(0.0, 2, "die")]))
    assert CHANGE_S > 0
