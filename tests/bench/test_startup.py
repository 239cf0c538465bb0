"""The benchmark of start-up: its phases, its goal, and one start of each contestant."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import startup
from bench.harness import Result


def test_a_phase_lasts_from_one_mark_to_the_next() -> None:
    assert startup.phases_of(10.0, {"imports": 12.0, "first step": 12.5}) == {"imports": 2.0, "first step": 0.5}


def test_the_goal_is_judged_by_the_slower_of_our_two_ways() -> None:
    seconds = {startup.RUN: [4.0], startup.LAUNCH: [6.0], startup.DDP: [5.0], startup.FLOOR: [1.0]}
    result = Result.of("startup", "s", seconds, ours=startup.RUN, limit=startup.DDP, better="lower", settings={})
    assert startup.slower_of_ours(result) == 1.2


def test_a_profile_has_the_median_of_every_phase(tmp_path: Path) -> None:
    own = startup.Starts(startup.RUN, 1, tmp_path)
    own.phases += [{"imports": 1.0}, {"imports": 9.0}, {"imports": 2.0}]
    assert startup.profile([own]).splitlines()[1].split() == ["paceline", "run", "2.000"]


def test_a_command_that_fails_has_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(startup.PROGRAMS, startup.FLOOR, "raise SystemExit(3)")
    with pytest.raises(startup.StartFailed, match="import torch ended with 3"):
        startup.Starts(startup.FLOOR, 1, tmp_path)()


@pytest.mark.parametrize(("name", "num_starts"), [(startup.DDP, 1 + startup.MAX_FAILED), (startup.RUN, 1)])
def test_only_the_peers_failures_are_repeated_and_not_for_ever(
    name: str, num_starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        startup.PROGRAMS, name, f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); raise SystemExit(3)"
    )
    monkeypatch.setattr(startup, "command", lambda _, script, __: [sys.executable, str(script)])
    own = startup.Starts(name, 1, tmp_path)
    with pytest.raises(startup.StartFailed):
        own()
    assert own.num_failed == num_starts
    assert (tmp_path / "starts").read_text() == "x" * num_starts


def test_a_peer_that_failed_once_has_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = tmp_path / "once"
    program = f"""
import json, os, sys, time
if not os.path.exists({str(once)!r}):
    open({str(once)!r}, "w")
    raise SystemExit(3)
json.dump({{"first step": time.monotonic()}}, open(sys.argv[1], "w"))
"""
    monkeypatch.setitem(startup.PROGRAMS, startup.DDP, program)
    monkeypatch.setattr(startup, "command", lambda _, script, __: [sys.executable, str(script)])
    own = startup.Starts(startup.DDP, 1, tmp_path)
    assert own() > 0
    assert (own.num_failed, len(own.phases)) == (1, 1)


@pytest.mark.parametrize(
    "name", [startup.RUN, *(pytest.param(n, marks=pytest.mark.slow) for n in (startup.LAUNCH, startup.DDP))]
)
def test_a_start_with_two_workers_is_timed_to_its_first_step(name: str, tmp_path: Path) -> None:
    own = startup.Starts(name, 2, tmp_path)
    seconds = own()
    (phases,) = own.phases
    assert list(phases) == ["interpreter", "imports", "worker", "connect", "set-up", "first step"]
    assert all(value >= 0 for value in phases.values())
    assert sum(phases.values()) == pytest.approx(seconds)
