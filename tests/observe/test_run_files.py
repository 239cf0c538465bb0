"""A run's folder: its names, its status, and how the run stands when nobody is left to say."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from paceline.observe import run_files
from paceline.observe.environment import describe_environment
from paceline.observe.run_files import (
    SILENT_S,
    RunFiles,
    State,
    create_run_folder,
    prepare_run_folder,
    read_settings,
    read_status,
    running,
    state_of,
    write_json,
)

NOON = datetime(2026, 11, 15, 12, 0, 0)


def state(files: RunFiles) -> State:
    return state_of(files, read_status(files))


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return create_run_folder(tmp_path / "runs", "2workers", NOON)


def test_folders_are_named_after_config_and_time_and_never_shared(tmp_path: Path) -> None:
    made = [create_run_folder(tmp_path, "2workers", NOON) for _ in range(3)]
    name = "2workers_2026-11-15_12-00-00"
    assert [files.root.name for files in made] == [name, f"{name}-2", f"{name}-3"]
    assert [(files.config_name, files.time_of_day) for files in made] == [
        ("2workers", "12:00:00"),
        ("2workers", "12:00:00-2"),
        ("2workers", "12:00:00-3"),
    ]
    assert sorted(path.name for path in made[0].root.iterdir()) == ["checkpoints", "plots", "ranks"]


@pytest.mark.parametrize(
    ("config", "name"), [("a b/c", "a_b_c"), ("../../etc", "etc"), ("..", "run"), ("", "run"), ("größe.v2", "größe.v2")]
)
def test_a_name_is_made_fit_for_a_folder(tmp_path: Path, config: str, name: str) -> None:
    files = create_run_folder(tmp_path, config, NOON)
    assert files.root == tmp_path / f"{name}_2026-11-15_12-00-00"


def test_a_folder_of_another_name_is_its_own_config(tmp_path: Path) -> None:
    files = prepare_run_folder(tmp_path / "mine")
    assert (files.config_name, files.time_of_day, files.is_run) == ("mine", "", False)


def test_a_run_is_live_until_it_ends(files: RunFiles) -> None:
    assert state(files) == "unknown"
    with running(files, total_steps=7):
        assert state(files) == "live"
    status = read_status(files)
    assert status is not None
    assert (state(files), status.total_steps, status.reason) == ("finished", 7, None)
    assert status.ended is not None
    assert status.ended >= status.started


@pytest.mark.parametrize(
    ("error", "ended", "reason"),
    [
        (ValueError("bad\nvery bad"), "failed", "ValueError: bad"),
        (RuntimeError(), "failed", "RuntimeError"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
        (SystemExit(75), "stopped", "asked to stop"),
        (SystemExit(3), "failed", "exit code 3"),
        (SystemExit(), "finished", None),
    ],
)
def test_what_ends_a_run_is_written_down(files: RunFiles, error: BaseException, ended: str, reason: str | None) -> None:
    with suppress(type(error)), running(files):
        raise error
    status = read_status(files)
    assert status is not None
    assert (state(files), status.reason) == (ended, reason)


def test_a_run_that_goes_on_keeps_when_it_first_began(files: RunFiles) -> None:
    with suppress(SystemExit), running(files):
        raise SystemExit(75)
    first = read_status(files)
    with running(files, total_steps=9):
        second = read_status(files)
        assert state(files) == "live"
    assert first is not None
    assert second is not None
    assert (second.started, second.num_starts, second.reason) == (first.started, 2, None)


def test_a_worker_that_leaves_does_not_end_the_run(files: RunFiles) -> None:
    """Another one leads it by then."""
    with running(files):
        own = read_status(files)
        assert own is not None
        run_files._write_status(files, replace(own, pid=1))
    assert read_status(files) == replace(own, pid=1)


def run_for_ever(files: RunFiles, up: Event) -> None:
    with running(files):
        up.set()
        signal.pause()


def test_a_killed_run_is_broken_off_also_before_its_parent_noticed(files: RunFiles) -> None:
    context = get_context("fork")  # a fresh interpreter would import torch first
    up = context.Event()
    process = context.Process(target=run_for_ever, args=(files, up))
    process.start()
    try:
        assert up.wait(30)
        assert state(files) == "live"
    finally:
        process.kill()
        assert process.pid is not None
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the process table
        assert state(files) == "crashed"
        process.join()
    assert state(files) == "crashed"


def rewrite(files: RunFiles, **changes: Any) -> None:
    write_json(files.status, json.loads(files.status.read_text()) | changes)


def test_another_process_with_the_same_number_is_not_taken_for_the_run(files: RunFiles) -> None:
    with running(files):
        status = read_status(files)
        assert status is not None
        assert status.process_started is not None
        rewrite(files, process_started=status.process_started - 1)
        assert state(files) == "crashed"


def test_a_run_on_another_host_counts_as_live_while_it_gives_signs(files: RunFiles) -> None:
    with running(files):
        rewrite(files, host=f"not-{socket.gethostname()}")
        assert state(files) == "live"
        os.utime(files.status, (0, files.status.stat().st_mtime - SILENT_S - 1))
        assert state(files) == "unknown"
        files.metrics.touch()
        assert state(files) == "live"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", '{"state": "running"}', '{"state": 1, "pid": "x"}', "[" * 100_000, "\udcff"]
)
def test_a_status_that_cannot_be_read_is_unknown(files: RunFiles, content: str) -> None:
    files.status.write_bytes(content.encode(errors="surrogateescape"))
    assert read_status(files) is None
    assert state(files) == "unknown"


def test_fields_and_states_of_a_later_version_do_no_harm(files: RunFiles) -> None:
    with running(files):
        rewrite(files, mood="good")
        assert state(files) == "live"
        rewrite(files, state="dreaming")
        assert state(files) == "unknown"


def test_the_environment_tells_versions_host_devices_and_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=b@c"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert describe_environment(tmp_path)["git"] is None
    git("init", "-q", "-b", "trunk")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    found = describe_environment(tmp_path)
    assert found["git"] == {"commit": git("rev-parse", "HEAD"), "branch": "trunk", "has_changes": False}
    (tmp_path / "a").write_text("2")
    assert describe_environment(tmp_path)["git"]["has_changes"]
    assert {"python", "paceline", "torch", "numpy"} <= found["versions"].keys()
    assert found["host"]["cores"] >= 1
    assert found["devices"] == [{"name": "cpu"}]
    assert found["command"] == sys.orig_argv
    assert json.loads(json.dumps(found)) == found


def test_without_git_the_environment_is_still_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_environment(tmp_path)["git"] is None


@pytest.mark.parametrize("kind", ["[{0}, {0}]", "{{p: {0}, q: {0}}}"])
def test_settings_that_refer_to_one_another_do_not_fill_the_memory(files: RunFiles, kind: str) -> None:
    lines = [f"a{i}: &a{i} {kind.format(f'*a{i - 1}')}" for i in range(1, 60)]
    files.config.write_text("\n".join(["first: 1", "a0: &a0 {x: 1}", *lines]))
    settings = read_settings(files.config)
    assert settings["first"] == 1
    assert len(settings) <= 5000
    assert max(len(str(value)) for value in settings.values()) < 1000
