"""Kill anything, at any instant: the run that ends is the one that was never disturbed, bit for bit.

Two workers in exact mode under `paceline run --max-restarts`, which is started again whenever it is gone. A seed makes
the choice of what is killed and when repeatable, as far as the machine is.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from disturbed import PACELINE_RUN, Disturbed, end, workers_of

from paceline.checkpoint.folders import complete_steps
from paceline.checkpoint.reader import verify
from paceline.checkpoint.run_folder import MEMORY, memory_folder

# Workers give up on one that is silent for so long; it is stopped for longer.
TIMEOUT_S = 4.0

# What is killed, and how often among all kills; SIGSTOP costs the timeout.
KINDS = {
    "worker": 4,
    "all": 2,
    "launcher": 2,
    "SIGTERM": 2,
    "worker, saving": 4,
    "launcher, saving": 2,
    "SIGSTOP": 1,
}

# What saves, and where from a restart goes on: the disk, or memory and now and then the disk.
SETTINGS = [{"every_steps": 1}, {"every_steps": 4, "snapshot_every": 1}]


class Chaos:
    """Disturbs runs, one after another, until there were so many kills; each must end as if nothing had happened."""

    def __init__(self, folder: Path, seed: int, num_kills: int, kinds: Sequence[str] = tuple(KINDS)) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._num_kills = num_kills
        self._kinds = self._deal(kinds)
        self.kills: Counter[str] = Counter()
        self.digests: list[str | None] = []
        self.num_starts = 0

    def _deal(self, kinds: Sequence[str]) -> Iterator[str]:
        """Every kind once, then by chance."""
        yield from self._random.sample(kinds, len(kinds))
        while True:
            yield from self._random.choices(kinds, [KINDS[kind] for kind in kinds])

    def go(self) -> None:
        while self.kills.total() < self._num_kills:
            folder = self._folder / f"run-{len(self.digests)}"
            folder.mkdir()
            settings = SETTINGS[len(self.digests) % len(SETTINGS)]
            run = Disturbed(folder, pause_s=0.15, timeout_s=TIMEOUT_S, **settings)
            self._finish(run)
            self.digests.append(run.digest)
            for left in MEMORY.glob(f"{memory_folder(run.root, '').name}*"):
                shutil.rmtree(left)  # of a run that was killed when it had ended but for the clean-up
            assert [verify(path) for path in sorted(run.root.glob("step-*"))] == [[]] * len(complete_steps(run.root))

    def _finish(self, run: Disturbed) -> None:
        while run.digest is None:
            launcher = run.start(*PACELINE_RUN, "--max-restarts", "100")
            self.num_starts += 1
            try:
                while launcher.poll() is None and self.kills.total() < self._num_kills:
                    self._disturb(run, launcher)
                code, err = end(launcher)
            finally:
                if launcher.poll() is None:
                    os.killpg(launcher.pid, signal.SIGKILL)
            # Done, stopped (before there was anything to save: as by any SIGTERM), or killed; restarted in vain, or
            # hit again while it was stopping.
            ends = (0, 75, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL)
            assert code in ends or re.search("NoProgressError|Communication|was killed by", err), err

    def _disturb(self, run: Disturbed, launcher: subprocess.Popen[str]) -> None:
        kind = next(self._kinds)
        if self._random.random() < 0.7:
            _wait_for_progress(run, launcher)
            delay_s = self._random.uniform(0.0, 1.0)
        else:
            delay_s = self._random.uniform(0.0, 4.0)  # so that start and end are hit too
        if not _wait(launcher, delay_s):
            return
        if "saving" in kind and not _wait_for_save(run, launcher):
            return
        workers = workers_of(launcher)
        if kind.startswith("launcher"):
            launcher.kill()
        elif kind == "SIGTERM":
            launcher.terminate()
        elif not workers:
            return
        elif kind == "SIGSTOP":
            _signal(self._random.choice(workers), signal.SIGSTOP)
        else:
            for worker in workers if kind == "all" else [self._random.choice(workers)]:
                _signal(worker, signal.SIGKILL)
        self.kills[kind] += 1


def _wait(launcher: subprocess.Popen[str], seconds: float) -> bool:
    """Whether the launcher still runs after that."""
    try:
        launcher.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _wait_for_progress(run: Disturbed, launcher: subprocess.Popen[str]) -> None:
    deadline, before = time.monotonic() + 15, run.step
    while time.monotonic() < deadline and launcher.poll() is None and run.step <= before:
        time.sleep(0.01)


def _wait_for_save(run: Disturbed, launcher: subprocess.Popen[str]) -> bool:
    """Whether a checkpoint is just being written."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and launcher.poll() is None:
        if run.root.is_dir() and any(path.name.startswith(".step-") for path in run.root.iterdir()):
            return True
        time.sleep(0.001)
    return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Disturbed(tmp_path_factory.mktemp("undisturbed")).run_here()


def report(chaos: Chaos) -> str:
    return f"{chaos.kills.total()} kills ({dict(chaos.kills)}), {chaos.num_starts} starts, {len(chaos.digests)} runs"


@pytest.mark.timeout(300)
def test_kills_while_saving(tmp_path: Path, undisturbed: str) -> None:
    kinds = ["worker, saving", "launcher, saving"]
    chaos = Chaos(tmp_path, seed=random.SystemRandom().randrange(10**6), num_kills=len(kinds), kinds=kinds)
    chaos.go()
    assert chaos.digests == [undisturbed], report(chaos)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_kill_of_every_kind_at_random_instants(tmp_path: Path, undisturbed: str) -> None:
    chaos = Chaos(tmp_path, seed=random.SystemRandom().randrange(10**6), num_kills=len(KINDS))
    chaos.go()
    assert chaos.digests == [undisturbed] * len(chaos.digests), report(chaos)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_kills_at_random_instants(tmp_path: Path, undisturbed: str) -> None:
    chaos = Chaos(tmp_path, seed=1, num_kills=200)
    chaos.go()
    print(report(chaos))
    assert chaos.digests == [undisturbed] * len(chaos.digests), report(chaos)
