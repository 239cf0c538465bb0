"""What it costs to be ready for the loss of a worker: the benchmark's arithmetic, and its turns."""

from __future__ import annotations

import os
from functools import partial

import pytest

from bench import readiness, scaling


def test_an_estimate_is_the_median_and_is_narrower_with_more_values() -> None:
    few = readiness.Estimate.of([0.98, 1.0, 1.02, 1.0, 0.99] * 4)
    many = readiness.Estimate.of([0.98, 1.0, 1.02, 1.0, 0.99] * 100)
    assert few.median == many.median == 1.0
    assert 0.98 < few.low <= many.low <= 1.0 <= many.high <= few.high < 1.02
    assert str(many) == "1.0000 (1.0000 .. 1.0000)"


def test_hidden_variables_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_SECRET", "1")
    with readiness.without_variables("BENCH_SECRET", "BENCH_UNSET"):
        assert "BENCH_SECRET" not in os.environ
    assert os.environ["BENCH_SECRET"] == "1"
    assert "BENCH_UNSET" not in os.environ


@pytest.mark.slow
def test_trainers_with_and_without_membership_take_turns() -> None:
    task = scaling.Task(num_workers=2, micro_batch=2, num_micro_batches=1, num_turns=2, seconds=0.05)
    found = readiness.measure(partial(scaling.paceline, task, quiet=True), 2, 4, 0.05)
    assert set(found["on_over_off"]) == {"wall", "cpu"}
    assert 0 < found["watcher_cpu"] < 0.1
    assert all(0 < share < 1 for share in found["agent_cpu"].values())
