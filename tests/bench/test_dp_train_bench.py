"""The benchmark of tiny models: its clock, its loop by hand, and a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import preloaded_python
import pytest
import torch

from bench import dp_train
from bench.dp_train import StepClock, Task
from bench.models import mlp

ROOT = Path(__file__).parents[2]


def test_the_clock_counts_only_what_follows_the_untimed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([10.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now_s))  # read twice, no more
    clock = StepClock(Task(num_turns=1, num_steps=4, seconds=0.0))
    for _ in range(clock.last_step):
        clock.step()
    assert clock.steps_per_s == 2.0


def test_the_loop_by_hand_and_dp_train_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    import paceline as pl

    models: list[torch.nn.Module] = []

    def make_model() -> torch.nn.Module:
        torch.manual_seed(0)
        models.append(mlp(*dp_train.WIDTHS))
        return models[-1]

    monkeypatch.setattr(dp_train, "make_model", make_model)
    task = Task(num_turns=1, num_steps=5, seconds=0.0)
    assert dp_train.by_hand(task, 2)() > 0
    by_hand = models[0]
    results = []
    train = pl.dp_train
    monkeypatch.setattr(pl, "dp_train", lambda *a, **k: results.append(train(*a, **k)))
    assert dp_train.dp_train(task, 2, dp_train.fused_adam)() > 0
    for ours, theirs in zip(results[0].model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_short_run() -> None:
    options = ["--turns", "1", "--steps", "4", "--seconds", "0.01"]
    command = [sys.executable, "-m", "bench", "dp_train", "--json", *options]
    done = preloaded_python.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found["parts"]) == ["one", "two", "mlp"]
    assert all(part["value"] > 0 for part in found["parts"].values())
