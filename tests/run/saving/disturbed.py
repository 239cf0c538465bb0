"""Runs in processes of their own that can be killed: a script, its launchers, and the process table."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from preloaded_python import PreloadedPython

TESTS = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(map(str, (TESTS.parent / "src", TESTS, TESTS / "run" / "saving")))

# Trains to the end and leaves the digest in FOLDER/../digest. Steps take a few milliseconds, a save about as long.
SCRIPT = """
import os, sys, time
from pathlib import Path

from resumable import setup, step
from models import digest

folder, settings, pause_s = Path(sys.argv[1]), eval(sys.argv[2]), float(sys.argv[3])
with setup(folder, data=__import__("models").images(167), **settings) as trainer:
    marks = folder.parent / "marks"
    def mark(record):
        marks.mkdir(exist_ok=True)
        (marks / f"rank-{trainer.world.rank}").write_text(str(record.step))
        time.sleep(pause_s)
    trainer.every(1, mark)
    for epoch in trainer.epochs(2):
        for batch in epoch:
            step(trainer, batch)
    state = digest(trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.position.to_dict())
    if trainer.is_main:
        (folder.parent / "digest.new").write_text(state)
        (folder.parent / "digest.new").rename(folder.parent / "digest")
"""


class Disturbed:
    """The script on some workers, in a folder of its own."""

    def __init__(self, folder: Path, *, pause_s: float = 0.0, **settings: Any) -> None:
        self.folder = folder
        self.root = folder / "run"
        self._script = folder / "script.py"
        self._script.write_text(SCRIPT)
        self._arguments = [str(self._script), str(self.root), repr(settings), str(pause_s)]

    @property
    def digest(self) -> str | None:
        path = self.folder / "digest"
        return path.read_text() if path.exists() else None

    @property
    def step(self) -> int:
        """The last step that rank 0 said it has done."""
        path = self.folder / "marks" / "rank-0"
        return int(path.read_text() or 0) if path.exists() else 0

    def run_here(self) -> str:
        """To the end, undisturbed and in this process; the digest."""
        argv, sys.argv = sys.argv, self._arguments
        try:
            runpy.run_path(str(self._script), run_name="__main__")
        finally:
            sys.argv = argv
        assert self.digest is not None
        return self.digest

    def start(
        self, *launcher: str, inside: Sequence[str] = (), popen: type[subprocess.Popen[str]] = PreloadedPython
    ) -> subprocess.Popen[str]:
        """inside: a command to run it with."""
        return popen(
            [*inside, sys.executable, *launcher, *self._arguments],
            env={
                **os.environ,
                "PYTHONPATH": PYTHONPATH,
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(self.folder),  # a launcher that is killed leaves its folder to the next one
                "CUDA_VISIBLE_DEVICES": "",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


PACELINE_RUN = ("-m", "paceline", "run", "--workers", "2")


def workers_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The launcher's worker processes, by their age: those below it that lead a session of their own."""
    try:
        family = psutil.Process(launcher.pid).children(recursive=True)
        return sorted((p for p in family if os.getsid(p.pid) == p.pid), key=lambda p: (p.create_time(), p.pid))
    except (psutil.NoSuchProcess, ProcessLookupError):
        return []


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, (
            f"ended with {process.returncode}: {process.stderr.read() if process.stderr else ''}"
        )
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def end(process: subprocess.Popen[str], timeout_s: float = 60.0) -> tuple[int, str]:
    """Its exit code and what it wrote to stderr."""
    try:
        _, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, err
