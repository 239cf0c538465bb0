"""`paceline runs`: requests to a run from a second process: status, save, stop and abort."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_process import Ended, invoke
from made_runs import make_run
from preloaded_python import PreloadedPython

from paceline.checkpoint.folders import complete_steps
from paceline.checkpoint.reader import verify
from paceline.observe.events import read_world_changes
from paceline.observe.json_lines import LineReader
from paceline.observe.metrics import read_curves
from paceline.observe.run_files import RunFiles, read_status, running
from paceline.run.control import ControlServer, socket_path

PARTS = """
import time, torch
def build_model(): return torch.nn.Linear(4, 1)
def samples():
    x = torch.arange(400.).reshape(100, 4) / 400
    return (x, x.sum(1, keepdim=True))
def loss(model, batch):
    time.sleep(0.01)  # otherwise the run ends before the first request
    return ((model(batch.x) - batch.y) ** 2).mean()
"""
PROJECT = """
model: {factory: "parts:build_model"}
loss: parts:loss
data: {train: {factory: "parts:samples"}}
trainer: {max_steps: 5000, global_batch: 10, micro_batch: 5, learning_rate: 0.01, log_every: 5}
checkpoints: {every_steps: 100000}
"""


def runs(*arguments: object) -> Ended:
    return invoke("runs", *arguments)


@pytest.fixture
def folder(runs: Path) -> Path:
    return runs


class Terminal:
    """A pseudo-terminal, read by a thread: a process blocks when nobody reads its output."""

    def __init__(self) -> None:
        self.shown = b""
        self._ours, self.theirs = pty.openpty()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # all writers have closed it
            while more := os.read(self._ours, 1 << 16):
                self.shown += more

    def close(self) -> None:
        os.close(self.theirs)
        self._reader.join()
        os.close(self._ours)


@contextmanager
def training(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], RunFiles, Terminal]]:
    """`paceline train` on a terminal, in the current folder; entered when the run listens."""
    Path("parts.py").write_text(PARTS)
    Path("slow.yaml").write_text(PROJECT)
    terminal = Terminal()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(Path.cwd())}
    process = PreloadedPython(
        [sys.executable, "-m", "paceline", "train", "slow.yaml", *arguments],
        env=environment,
        stdout=terminal.theirs,
        stderr=terminal.theirs,
        start_new_session=True,
    )
    try:
        wait_until(lambda: list(Path("runs").glob("slow_*/control/socket")), process)
        (path,) = Path("runs").glob("slow_*")
        yield process, RunFiles(path), terminal
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        terminal.close()


def wait_until(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.05)


def live(folder: Path, name: str = "slow") -> Any:
    """A live run of this process that does not listen for requests."""
    files = RunFiles(folder / name)
    files.root.mkdir()
    return running(files)


@pytest.mark.usefixtures("folder")
def test_status_save_and_stop_of_a_live_run() -> None:
    with training("--workers", "2") as (process, files, terminal):
        wait_until(lambda: re.search(rb"\d/5000 +loss \d", terminal.shown), process)
        wait_until(lambda: json.loads(runs("status", "--json").out)[0].get("step", 0) > 5, process)
        (status,) = json.loads(runs("status", "--json").out)
        assert status["state"] == "live"
        assert status["total_steps"] == 5000
        assert status["workers"] == len(status["shares"]) == len(status["waiting"]) == 2
        assert status["loss"] > 0
        assert status["eta_s"] > 0
        assert status["samples_per_s"] > 0
        assert status["pid"] != process.pid
        assert status["checkpoint"] is None
        text = runs("status", "slow").out
        assert f"run         {files.root.name}\nstate       live for " in text
        assert " of 5000, epoch " in text

        saved = runs("save", "--wait", "--timeout", 60)
        assert saved.code == 0, saved.err
        checkpoint = Path(saved.out.strip())
        assert checkpoint.parent == files.checkpoints
        assert verify(checkpoint) == []
        assert json.loads(runs("status", "--json").out)[0]["checkpoint"] == str(checkpoint.absolute())

        refused = runs("leave", "--rank", 1)
        assert (refused.code, "the workers of this run cannot leave: start it with" in refused.err) == (1, True)

        stopped = runs("stop", files.root, "--wait", "--timeout", 60)
        assert stopped.code == 0, stopped.err
        newest = complete_steps(files.checkpoints)[-1]
        assert stopped.out.startswith(f"{files.root.name} stopped (asked to stop), at ")
        assert stopped.out.endswith(f"; newest checkpoint {files.checkpoints}/step-{newest:08d}\n")
        assert process.wait(30) == 75
        assert not socket_path(files.root).exists()
    again = runs("save", "slow")
    assert again.code == 3
    assert f"{files.root.name} is not running: stopped (asked to stop), at " in again.err


@pytest.mark.usefixtures("folder")
def test_the_next_rank_0_records_the_run_and_takes_requests() -> None:
    """Rank 0 is killed, another worker is asked to leave, and the last one to stop."""

    def status() -> dict[str, Any]:
        (report,) = json.loads(runs("status", "--json").out)
        assert isinstance(report, dict)
        return report

    with training("--workers", "3", "min_workers=1", "trainer.global_batch=15") as (process, files, _):
        wait_until(lambda: status().get("step", 0) > 7, process)
        first = status()
        os.kill(first["pid"], signal.SIGKILL)
        wait_until(lambda: status().get("pid", first["pid"]) != first["pid"], process)
        wait_until(lambda: status().get("workers") == 2, process)
        assert status()["step"] >= first["step"]
        left = runs("leave", "--rank", 1)
        assert (left.code, left.err) == (0, "")
        assert left.out.startswith(f"rank 1 leaves {files.root.name} after step ")
        wait_until(lambda: status().get("workers") == 1, process)
        assert "the only worker cannot leave: stop the run instead" in runs("leave", "--rank", 0).err
        alone_since = status()["step"]
        wait_until(lambda: status()["step"] > alone_since + 5, process)
        assert runs("stop", "--wait", "--timeout", 60).code == 0
        assert process.wait(30) == 75
    metrics = read_curves(files.metrics)
    steps, losses = metrics.series("loss")
    assert {1, *range(5, steps[-1], 5)} <= {*steps.tolist()}
    assert len([line for line in LineReader(files.metrics).read() if "loss" in line]) == len(losses)
    # An epoch has six steps of 15 samples and one of 10.
    assert metrics.series("samples")[1].tolist() == (steps // 7 * 100 + steps % 7 * 15).tolist()
    changes = read_world_changes(files)
    assert [(change.num_left, change.size) for change in changes] == [(1, 2), (1, 1)]


@pytest.mark.usefixtures("folder")
def test_aborted_run_ends_immediately_and_is_not_restarted() -> None:
    with training("max_restarts=3", "--workers", "1") as (process, files, _):
        assert runs("abort").code == 2  # no terminal for the confirmation
        assert process.poll() is None
        aborted = runs("abort", "-y")
        assert (aborted.code, aborted.out) == (0, f"{files.root.name} is aborted\n"), aborted.err
        assert process.wait(30) == 1
    assert complete_steps(files.checkpoints) == []
    status = read_status(files)
    assert status is not None
    assert status.state == "failed"
    assert "aborted" in str(status.reason)


def test_killed_run_with_a_stale_socket(folder: Path) -> None:
    files = make_run(folder, status={"state": "running", "host": socket.gethostname(), "pid": 2**22 + 1})
    path = socket_path(files.root)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    ended = runs("stop", "2workers")
    assert ended.code == 3
    assert f"{files.root.name} is not running: crashed, last write at 20" in ended.err
    status = runs("status", "2workers")
    assert status.code == 3
    assert "state  crashed, last write at 20" in status.out


def test_default_is_the_only_live_run(folder: Path) -> None:
    make_run(folder, "ended")
    nobody = runs("save")
    assert (nobody.code, nobody.out) == (3, "")
    assert nobody.err == ("paceline runs save: no run in runs is running (`paceline logs list runs` lists all runs)\n")
    with live(folder, "a"), live(folder, "b"):
        several = runs("save")
        assert several.code == 2
        assert several.err == "paceline runs save: 2 runs are running: choose one of them\n  a\n  b\n"
        assert "no run 'c' in runs" in runs("save", "c").err


def test_status_shows_all_live_runs(folder: Path) -> None:
    with live(folder, "a"), live(folder, "b"):
        status = runs("status", "--json")
    assert status.code == 0
    assert [(report["run"], report["state"]) for report in json.loads(status.out)] == [("a", "live"), ("b", "live")]


def test_run_that_does_not_listen_yet(folder: Path) -> None:
    with live(folder):
        saved = runs("save")
        assert saved.code == 1
        assert "No such file or directory. Runs take requests once their workers have started; try again" in saved.err
        assert "\nno answer  no process listens at " in runs("status").out


def test_a_run_without_checkpoints_cannot_save(folder: Path) -> None:
    def refuse() -> None:
        raise ValueError("there is nowhere to save to")

    with live(folder), ControlServer(socket_path(folder / "slow"), dict, refuse, dict, dict):
        saved = runs("save", "--wait")
    assert (saved.code, saved.err) == (1, "paceline runs save: there is nowhere to save to\n")


def test_save_times_out(folder: Path) -> None:
    with live(folder), ControlServer(socket_path(folder / "slow"), dict, lambda: {"step": 7}, dict, dict):
        saved = runs("save", "--wait", "--timeout", "0.2")
        assert saved.code == 1
        assert "slow saved no checkpoint after step 7 within 0.2 s and is still running: see " in saved.err
        assert runs("save").out == "slow saves a checkpoint after step 8 or shortly after it\n"


def test_run_on_another_host_is_refused(folder: Path) -> None:
    files = make_run(folder, status={"state": "running", "host": "elsewhere"})
    files.metrics.touch()
    assert "runs on elsewhere: use the command there" in runs("stop", "2workers").err


def test_watch_ends_with_the_run(folder: Path) -> None:
    make_run(folder, "a", status={"state": "failed", "reason": "out of memory", "ended": 1794740400})
    watched = runs("status", "a", "--watch", "--json")
    assert watched.code == 0
    (line,) = watched.out.split("\n\n")[:-1]
    assert json.loads(line)[0]["reason"] == "out of memory"


@pytest.mark.parametrize("has_answer", [True, False])
def test_abort_asks_for_confirmation(folder: Path, monkeypatch: pytest.MonkeyPatch, has_answer: bool) -> None:
    questions: list[str] = []

    def answer(question: str) -> str:
        questions.append(question)
        if not has_answer:
            raise EOFError  # Ctrl-D
        return ""

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    abort = SimpleNamespace(is_called=False)
    with (
        live(folder),
        ControlServer(socket_path(folder / "slow"), dict, dict, dict, lambda: setattr(abort, "is_called", True)),
    ):
        ended = runs("abort")
    assert (ended.code, ended.err) == (1, "paceline runs abort: slow was not aborted\n")
    assert questions == ["abort slow? it has no checkpoint yet [y/N] "]
    assert not abort.is_called


@pytest.mark.parametrize("command", ["save", "stop"])
def test_a_timeout_needs_something_to_wait_for(command: str) -> None:
    ended = runs(command, "--timeout", "5")
    assert (ended.code, ended.err) == (
        2,
        f"paceline runs {command}: --timeout would be ignored without --wait: leave it out\n",
    )


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_invalid_timeouts(text: str) -> None:
    ended = runs("save", "--timeout", text)
    assert ended.code == 2
    assert f"{text!r}: choose a number of seconds > 0" in ended.err


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("arguments", [[], ["-q"]])
def test_a_terminated_run_is_saved_and_says_how_to_resume_it(arguments: list[str]) -> None:
    with training(*arguments) as (process, files, terminal):
        process.terminate()
        assert process.wait(60) == 75
        assert complete_steps(files.checkpoints)
    assert f"{files.root.name} is not running: stopped" in runs("save", "slow").err
    lines = terminal.shown.decode().splitlines()
    if arguments:
        assert lines == []
    else:
        assert any(
            line.endswith("SIGTERM: stopping after this step; send it again to exit immediately") for line in lines
        )
        assert lines[-1].endswith(f"resume it with: paceline train --resume {files.root.name}")
