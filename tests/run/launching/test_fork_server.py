"""The process that workers are forked from: what they share through it, and what they do not."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import WorkerError
from paceline.run.launching import agent, fork_server
from paceline.run.launching.launch import launch
from paceline.run.launching.worker_exit import ExitKind, WorkerExit


@pytest.fixture
def nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "PRELOADED_MODULES", ())
    monkeypatch.setattr(agent, "GRACE_S", 1.0)


@pytest.mark.usefixtures("plain_processes")
def test_workers_share_imports_and_nothing_else(tmp_path: Path) -> None:
    def work(folder: Path) -> None:
        import gc
        import random

        found: dict[str, Any] = {"imported": [name for name in ("torch", "torch._dynamo") if name in sys.modules]}
        import numpy as np
        import torch.distributed as dist

        start = os.environ["TORCHELASTIC_RESTART_COUNT"]
        found |= {"parent": os.getppid(), "session": os.getsid(0) == os.getpid(), "gc": gc.isenabled()}
        found["drawn"] = [random.random(), float(np.random.random())]
        found["frozen"] = gc.get_freeze_count() > 10_000
        dist.init_process_group("gloo")  # the user's own, on each start: where it was before nobody is any more
        (folder / f"{start}-{dist.get_rank()}").write_text(json.dumps(found))
        dist.barrier()
        if start == "0":
            raise ValueError("once")

    launch(work, 2, args=(tmp_path,), max_restarts=1)
    found = [json.loads((tmp_path / name).read_text()) for name in ("0-0", "0-1", "1-0", "1-1")]
    assert {tuple(own["imported"]) for own in found} == {("torch", "torch._dynamo")}
    assert len({own["parent"] for own in found} - {os.getpid()}) == 1
    assert all(own["session"] and own["gc"] and not own["frozen"] for own in found)
    for numbers in zip(*(own["drawn"] for own in found), strict=True):
        assert len(set(numbers)) == 4


def test_what_is_imported_ahead_touches_no_accelerator() -> None:
    """After that a fork could not use it."""
    program = """
        import sys
        import torch

        def refuse(*_):
            raise SystemExit("an import asked for accelerators")

        for module, names in (
            (torch.cuda, ["is_available", "device_count", "_lazy_init"]),
            (torch.accelerator, ["is_available", "current_accelerator", "device_count"]),
        ):
            for name in names:
                assert hasattr(module, name)
                setattr(module, name, refuse)
        for name in sys.argv[1:]:
            __import__(name)
    """
    words = [sys.executable, "-c", textwrap.dedent(program), *fork_server.PRELOADED_MODULES]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_forked_workers_use_the_gpu() -> None:
    def work() -> float:
        import torch

        return float(torch.ones(8, device="cuda").sum().item())

    assert launch(work, 2) == 8.0


def test_an_error_of_an_import_is_the_workers_own(tmp_path: Path) -> None:
    """A file of the user's own that hides torch, or something torch needs."""
    (tmp_path / "attempts.py").write_text("number = 0\n")
    lines = ["import attempts", "attempts.number += 1", "raise RuntimeError(f'not torch, {attempts.number}')"]
    (tmp_path / "torch.py").write_text("\n".join(lines))
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            from paceline.core.errors import WorkerError
            from paceline.run.launching.launch import launch

            def work():
                import torch

            print(launch(lambda: 7, 2))
            try:
                launch(work, 2)
            except WorkerError as error:
                print(str(error).partition("\\n")[0].partition(" ")[2])
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert re.fullmatch(r"7\n[01] failed: RuntimeError: not torch, 1\n", done.stdout)


@pytest.mark.usefixtures("nothing_ahead")
def test_its_end_is_the_end_of_the_workers_and_no_obstacle_to_a_restart(tmp_path: Path) -> None:
    def work(folder: Path) -> str:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            (folder / str(os.getpid())).touch()
            while len(list(folder.iterdir())) < 2:
                time.sleep(0.01)
            if os.environ["RANK"] == "1":
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        return "restarted"

    with pytest.raises(WorkerError, match=r"^rank 0 was killed by SIGKILL"):
        launch(work, 2, args=(tmp_path,))
    deadline_s = time.monotonic() + 10.0
    for path in tmp_path.iterdir():
        while Path("/proc", path.name).exists():
            assert time.monotonic() < deadline_s, "a worker outlived its parent"
            time.sleep(0.01)
        path.unlink()
    assert launch(work, 2, args=(tmp_path,), max_restarts=1) == "restarted"


@pytest.mark.usefixtures("nothing_ahead")
def test_a_worker_that_leaves_without_a_word_has_failed() -> None:
    def work() -> None:
        if os.environ["RANK"] == "1":
            os._exit(0)
        time.sleep(600)

    with pytest.raises(WorkerError, match=r"^rank 1 exited with code 0 before its work was done$"):
        launch(work, 2)


def test_a_worker_that_cannot_be_started_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others live on: they would end with the server."""

    def fork(environment: dict[str, str], *_: object) -> int:
        if environment["RANK"] == "1":
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return 1000

    monkeypatch.setattr(fork_server, "_fork_worker", fork)
    environments = {rank: {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "2"} for rank in range(2)}
    running: dict[int, int] = {}
    ours, theirs = Pipe()
    with ours, theirs:
        fork_server._start_workers(environments, tmp_path, {}, theirs, running)
        assert [ours.recv(), ours.recv()] == [{0: 1000}, (1, 1)]
    assert running == {1000: 0}
    ended = WorkerExit.read(tmp_path / "start-2", 1, 1)
    assert (ended.kind, ended.message.partition(";")[0]) == (
        ExitKind.DIED,
        "rank 1 cannot be started: Resource temporarily unavailable",
    )


def test_the_process_id_of_an_ended_worker_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that it may be another program's."""
    killed: list[int] = []
    monkeypatch.setattr(fork_server.os, "killpg", lambda group, _: killed.append(group))
    server = object.__new__(fork_server.ForkServer)
    server.pids, server.exit_codes = {0: 1000, 1: 1001}, {1: -9}
    server.kill_group(1)
    server.kill_group(0)
    server.kill()
    assert killed == [1001, 1000, 1000]


@pytest.mark.usefixtures("nothing_ahead")
def test_one_that_was_stopped_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its workers are started again, or have ended already, of which it cannot tell."""
    monkeypatch.setattr(fork_server, "MAX_STOPPED_POLLS", 3)

    def work(ends: bool) -> str:
        start = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if start == "0":
            if os.environ["RANK"] == "1":
                os.kill(os.getppid(), signal.SIGSTOP)
            if not ends:
                time.sleep(600)
        return start

    assert launch(work, 2, args=(False,), max_restarts=3) == "1"
    assert "the fork server (pid" in capfd.readouterr().err
    assert launch(work, 2, args=(True,), max_restarts=3) == "0"
