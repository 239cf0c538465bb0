"""`paceline doctor`: what it prints about runs that are live, finished or killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import time
from typing import Any

import pytest
from in_process import invoke
from made_runs import make_run, row

from paceline.observe.run_files import write_json


def lines_with(speeds: list[float], count: int = 20, **values: Any) -> list[dict[str, Any]]:
    lanes = {"computing": [0.9, 0.9], "data": [0.0, 0.0], "exchange": [0.02, 0.02], "rest": [0.08, 0.08]}
    usual = {"speeds": speeds, "lanes": lanes, "waiting": [0.0, 0.0], "shares": [60, 20]}
    return [row(step, **{**usual, **values}) for step in range(1, count + 1)]


def test_a_slow_worker_as_text(tmp_path: Path) -> None:
    make_run(tmp_path, rows=lines_with([30.0, 10.0]))
    ended = invoke("doctor", "--runs", tmp_path)
    assert ended.out.splitlines() == [
        "2workers_2026-11-15_12-00-00: finished, step 20, verdicts on steps 17 to 20",
        "",
        "info     worker 1 is 3.0 times slower than the others since the start; it gets 25% of the work "
        "(costs 33% of the speed)",
        "         the plan already gives it less work; look for other processes, heat or a power limit, or train "
        "without it if its work is not worth its part in the exchange",
    ]
    assert ended.code == 0


def test_what_to_change_is_named_with_its_value(tmp_path: Path) -> None:
    files = make_run(tmp_path, rows=lines_with([30.0, 10.0], waiting=[0.6, 0.0]))
    files.config.write_text("trainer: {shares: equal}\n")
    ended = invoke("doctor", files.root)
    assert "         try trainer.shares: measured (the work is divided by 'equal', not by measured speed)" in ended.out
    assert ended.code == 10


def test_json_has_the_figures(tmp_path: Path) -> None:
    make_run(tmp_path, rows=lines_with([30.0, 10.0]))
    found = json.loads(invoke("doctor", "2workers", "--runs", tmp_path, "--json").out)
    assert (found["run"], found["state"], found["step"]) == ("2workers_2026-11-15_12-00-00", "finished", 20)
    (verdict,) = found["verdicts"]
    assert (verdict["kind"], verdict["rank"], verdict["severity"]) == ("slow worker", 1, "info")
    assert verdict["figures"]["slower"] == pytest.approx(3.0)
    assert [change["setting"] for change in verdict["changes"]] == [""]


@pytest.mark.parametrize(
    ("status", "text", "code"),
    [
        ({}, "ok       nothing wrong at 80.0 samples/s: computing 90%, ", 0),
        ({"state": "failed", "reason": "Error: \x1b[2J"}, "error    the run failed: Error: \\x1b[2J", 20),
        ({"state": "failed", "reason": "loss is nan at step 3"}, "error    the loss diverged and the run failed: ", 20),
    ],
)
def test_how_a_run_ended(tmp_path: Path, status: dict[str, Any], text: str, code: int) -> None:
    make_run(tmp_path, rows=lines_with([30.0, 30.0]), status=status)
    ended = invoke("doctor", "--runs", tmp_path)
    assert text in ended.out
    assert ended.code == code


def test_a_run_on_another_host_that_has_been_silent_for_long_has_stalled(tmp_path: Path) -> None:
    """Its state is "unknown". Without a status it may have ended long ago."""
    files = make_run(tmp_path, rows=lines_with([30.0, 30.0]), status={"state": "running", "host": "elsewhere"})
    for path in (files.status, files.metrics):
        os.utime(path, (time() - 1200, time() - 1200))
    ended = invoke("doctor", "--runs", tmp_path)
    assert "2workers_2026-11-15_12-00-00: unknown" in ended.out
    assert "stalled" not in ended.out  # no worker has a status
    assert "no step for 20:" in ended.out
    assert ended.code == 10
    write_json(files.worker(0), {"rank": 0, "host": "elsewhere"})
    os.utime(files.worker(0), (time() - 1200, time() - 1200))
    ended = invoke("doctor", "--runs", tmp_path)
    assert "after step 20: all workers have stalled" in ended.out
    assert ended.code == 20
    files.status.unlink()
    assert invoke("doctor", "--runs", tmp_path).code == 0


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    files = make_run(tmp_path, rows=[])
    assert invoke("doctor", files.root).out.splitlines()[-1] == "ok       too early to tell: 0 lines of metrics"


def test_what_is_no_run_is_an_error(tmp_path: Path) -> None:
    ended = invoke("doctor", "other", "--runs", tmp_path)
    assert ended.code == 1
    assert ended.err.startswith("paceline doctor: there is no run 'other'")


def test_files_that_are_damaged_are_ignored(tmp_path: Path) -> None:
    files = make_run(tmp_path, rows=lines_with([30.0, 30.0]))
    files.ranks.mkdir(exist_ok=True)
    files.timeline.mkdir()
    damaged = [files.environment, files.events, files.ranks / "rank-0.json", files.timeline / "rank-0.jsonl"]
    for path in (files.config, *damaged):
        path.write_bytes(b"\xff[{:\n")
    ended = invoke("doctor", files.root)
    assert "nothing wrong" in ended.out
    for path in damaged:
        path.write_text('[1, {"rank": "x"}]\n{"samples": 3, "session": 4, "event": 1, "step": 2}\n')
    assert invoke("doctor", files.root).out == ended.out
