from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench.cpu_quota import missing_cpu_quota
from bench.plan import CASES, Case, Machine, Round, Turn, crew_of, situation, summary, take_round, take_turn
from paceline.plan.predict import Device, Exchange, Prediction, predict
from paceline.plan.profile import Profile, StepTimes, Subject

PROFILE = Profile(
    Subject("LanguageModel", 1000, 4_000_000, 4),
    "vm",
    2.0,
    (Device("0.4", 0.1, host="vm", cores=0.4), Device("1", 0.04, host="vm", cores=1.0)),
    (1, 1),
    contention=0.1,
    exchange=Exchange(1e-4, 1e9),
)


def test_the_combinations_cover_what_is_asked_for() -> None:
    assert len(CASES) >= 12
    assert {len(case.quotas) for case in CASES} == {1, 2, 3, 4}
    assert {(1, 0.4), (1, 0.7, 0.4)} <= {case.quotas for case in CASES}
    assert {case.mbit for case in CASES} == {None, 100, 1000}
    assert {case.strategy for case in CASES} == {"gradients", "cadence", "averaging"}
    assert {case.exact for case in CASES} == {True, False}
    assert len({case.model for case in CASES}) == 3


def predicted(case: Case) -> Prediction:
    return predict(*situation(PROFILE, case))


def test_a_combination_is_predicted_from_the_profile_alone() -> None:
    assert predicted(Case("medium", (1, 0.4))).shares == (23, 9)
    slow, fast = (predicted(Case("medium", (1, 1), mbit=mbit)).samples_per_s for mbit in (100, 1000))
    assert slow < fast


class Recorded(Machine):
    """Notes the order of its calls. Everything takes as long as it should, but what is measured."""

    def __init__(self, calls: list[str], rates: list[float]) -> None:
        self._calls, self._rates = calls, rates

    def profile(self, case: Case, num_steps: int) -> tuple[Profile, StepTimes]:
        self._calls.append("profile")
        seconds = 0.04 / case.quotas[0]
        device = Device("cpu", seconds, host="vm", cores=case.quotas[0])
        num = len(case.quotas)
        times = StepTimes((seconds,) * num, (0.0,) * num, (0.0,) * num, (0.0,) * num, 0.001)
        return replace(PROFILE, devices=(device,), counts=(1,)), times

    def measure(self, case: Case, seconds: float) -> Turn:
        self._calls.append("measure")
        return Turn(self._rates.pop(), {})


def test_a_round_predicts_before_it_measures() -> None:
    calls: list[str] = []
    cases = [Case("medium"), Case("medium", (1, 0.4))]
    found: dict[Case, list[Round]] = {case: [] for case in cases}
    options = argparse.Namespace(steps=4, seconds=1.0)
    take_round(Recorded(calls, [50.0, 100.0]), cases, found, options)
    assert calls == ["profile"] * 3 + ["measure"] * 2  # two quotas, and a pair
    assert found[cases[0]][0].ratio == pytest.approx(1.0)
    assert found[cases[1]][0].predicted.shares == (23, 9)


def test_the_result_tells_the_medians_of_the_rounds() -> None:
    cases = {Case("medium"): (1.0, 1.1, 0.5), Case("medium", (1, 1)): (1.25, 1.25, 9.0)}
    found = {
        case: [Round(own := predicted(case), 0.0, Turn(own.samples_per_s / ratio, {"rest": 0.1})) for ratio in ratios]
        for case, ratios in cases.items()
    }
    result = summary(found, argparse.Namespace(rounds=3, steps=4, seconds=1.0))
    assert result.ratio == pytest.approx(1.125)
    assert result.detail["worst_error"] == pytest.approx(0.25)
    assert json.loads(result.to_json())["detail"]["cases"]["medium, 100, gradients"]["ratio"] == pytest.approx(1.0)
    assert "error: median 12.5%, worst 25.0%" in result.table()


def workers_rank(number: int) -> tuple[str, str, int]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], number


def fail() -> None:
    raise ValueError("as asked for")


def numbers(first: int) -> Iterator[int | None]:
    yield None
    yield from range(first, first + 10)


@pytest.mark.skipif(missing_cpu_quota() is not None, reason="needs cgroups")
def test_a_crew_serves_worlds_of_any_size() -> None:
    with crew_of(2) as crew:
        assert crew.call(1, workers_rank, 7) == ("0", "1", 7)
        assert crew.call(2, workers_rank, 8) == ("0", "2", 8)
        assert [crew.call(2, take_turn, numbers, first) for first in (1, 20, 1)] == [1, 20, 2]
        with pytest.raises(RuntimeError, match="as asked for"):
            crew.call(2, fail)
