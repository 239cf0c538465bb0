"""Runs by path, by name and by prefix, and the messages for names that match no run or several."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from in_process import Ended, invoke
from made_runs import make_run


def logs_command(*arguments: object) -> Ended:
    return invoke("logs", *arguments)


def test_run_is_found_by_path_name_or_prefix(runs: Path) -> None:
    first = make_run(runs, "one")
    make_run(runs, "two", minutes=1)
    for named in (first.root, first.root.resolve(), first.root.name, "one", "one_2026"):
        assert logs_command("summary", named).out.startswith("run         one_")
    assert logs_command("summary").out.startswith("run         two_")
    both = logs_command("summary", "two", "one", "one", "--format", "one-line").out.splitlines()
    assert [line[:3] for line in both] == ["two", "one"]
    elsewhere = runs.rename("elsewhere")
    assert logs_command("summary", "one", "--runs", elsewhere).code == 0


def test_exact_name_wins_over_longer_names(runs: Path) -> None:
    first = make_run(runs, "one")
    make_run(runs, "one")
    assert (runs / f"{first.root.name}-2").is_dir()
    assert logs_command("summary", first.root.name).code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["summary", "x"], "summary: there is no run 'x' in runs (`paceline logs list runs` lists all runs)"),
        (["summary", "2worker_2026"], "did you mean 2workers_2026-11-15_12-01-00?"),
        (
            ["summary", "2w"],
            "summary: '2w' matches 2 runs: use a longer prefix\n  2workers_2026-11-15_12-00",
        ),
        (["summary", "./empty"], "summary: empty is not a run: it has neither status.json nor metrics.jsonl"),
        (["summary", "--runs", "empty"], "summary: there is no run in empty: a run's folder has a status.json or"),
        (["summary", "--all", "--runs", "empty"], "summary: there is no run in empty"),
        (["summary", "--all", "2w"], "summary: --all cannot be combined with names of runs"),
        (
            ["summary", "--runs", "nowhere"],
            "summary: nowhere does not exist: choose the folder that holds your runs",
        ),
        (["list", "nowhere"], "list: nowhere does not exist"),
        (["list", "file"], "list: file is not a folder: choose the folder that holds your runs"),
        (["plot", "x"], "plot: there is no run 'x' in runs"),
    ],
)
def test_runs_that_cannot_be_found(runs: Path, arguments: list[str], message: str) -> None:
    make_run(runs)
    make_run(runs, minutes=1)
    Path("empty").mkdir()
    Path("file").touch()
    ended = logs_command(*arguments)
    assert (ended.code, ended.out) == (1, "")
    assert message in ended.err
    assert ended.err.startswith("paceline logs ")


def test_folder_named_like_a_metrics_file_is_not_a_run(runs: Path) -> None:
    (runs / "a" / "metrics.jsonl").mkdir(parents=True)
    assert logs_command("list").out == "no runs in runs\n"


def test_many_runs_in_one_command(runs: Path) -> None:
    for number in range(25):
        make_run(runs, f"run{number:03}", minutes=number)
    assert len(logs_command("list").out.splitlines()) == 26
    assert len(logs_command("summary", "--all", "--format", "one-line").out.splitlines()) == 25
    assert len(json.loads(logs_command("summary", "--all", "--format", "json").out)) == 25
    others = [f"run{number:03}" for number in range(24)]
    assert logs_command("plot", "run024", "--compare", *others).code == 0
    assert logs_command("summary", "run").err.count("\n  run0") == 25


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_run_of_another_user_does_not_hide_the_others(runs: Path) -> None:
    make_run(runs, "one")
    private, partly = make_run(runs, "private", minutes=1), make_run(runs, "partly", minutes=2)
    partly.events.touch()
    runs.resolve().parent.chmod(0o755)
    for command in ("list", "summary"):
        assert logs_command(command).code == 0  # imports what the user may not
    closed = (private.root, partly.metrics, partly.events)
    for path in closed:
        path.chmod(0)
    try:
        with as_nobody():
            listed, summary = logs_command("list"), logs_command("summary")
    finally:
        for path in closed:
            path.chmod(0o755)
    assert [line.partition("_")[0] for line in listed.out.splitlines()[1:]] == ["one", "partly"]
    assert "metrics.jsonl cannot be read: Permission denied" in summary.out
