from __future__ import annotations

import argparse
import json

import pytest

from bench.plan import CASES, Case, Known, summary
from paceline.plan.predict import Device, Exchange
from paceline.plan.profile import Profile, Subject

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


def test_a_combination_is_predicted_from_the_profiles_alone() -> None:
    known = Known(PROFILE, 1.0)
    pair = known.predict(Case("medium", (1, 0.4)))
    assert pair.shares == (23, 9)
    assert (
        known.predict(Case("medium", (1, 1), mbit=100)).samples_per_s
        < known.predict(Case("medium", (1, 1), mbit=1000)).samples_per_s
    )


def test_the_result_tells_errors() -> None:
    known, cases = Known(PROFILE, 1.0), [Case("medium"), Case("medium", (1, 1))]
    factors = dict(zip(cases, (1.0, 1.25), strict=True))
    measured = {case: [(known.predict(case).samples_per_s / factor, 1.0)] for case, factor in factors.items()}
    options = argparse.Namespace(steps=20, seconds=4.0)
    result = summary({("medium", False): known}, measured, options)
    assert result.ratio == pytest.approx(1.125)
    assert result.detail["worst_error"] == pytest.approx(0.25)
    assert json.loads(result.to_json())["ratio"] == pytest.approx(1.125)
    assert "1 of 2 inside the predicted interval" in result.table()


def test_a_machine_that_is_slower_by_now_is_no_error_of_the_prediction() -> None:
    """Everything takes twice as long, the yardstick too; the link is as fast as before."""
    known = Known(PROFILE, 1.0)
    for case in (Case("medium", (1, 1)), Case("medium", (1, 1), mbit=100)):
        now = known.predict(case, 2.0).samples_per_s
        found = summary({("medium", False): known}, {case: [(now, 2.0)]}, argparse.Namespace(steps=20, seconds=4.0))
        row = found.detail["cases"][case.name]
        assert row["ratio"] == pytest.approx(1)
        assert row["raw_ratio"] > 1.3
    assert known.predict(Case("medium", (1, 1)), 2.0).samples_per_s == pytest.approx(
        known.predict(Case("medium", (1, 1))).samples_per_s / 2
    )
