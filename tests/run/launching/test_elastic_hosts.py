"""Hosts that come and go, each a network namespace: the result is that of one undisturbed worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from disturbed import PYTHONPATH, end, wait_until, workers_of
from preloaded_python import PreloadedPython

from bench.namespaces import ADDRESSES, INTERFACE, PORT, Link, missing_slow_link, slow_link
from paceline.checkpoint.folders import complete_steps

MISSING = missing_slow_link()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

ADDRESS = f"{ADDRESSES[0]}:{PORT}"

# Steps are slow until the file `fast` appears, so that the test can disturb the run between two of them.
SCRIPT = """
import sys, time
from pathlib import Path

import torch
from models import digest, images
from resumable import build, step

import paceline as pl

folder = Path(sys.argv[1])
torch.set_num_threads(1)
trainer = pl.Trainer.setup(
    build, lambda params: torch.optim.AdamW(params, lr=0.01), data=images(167), exact=True, global_batch=16,
    micro_batch=4, seed=5,
)
with trainer:
    def mark(record):
        if trainer.is_main:
            (folder / "status.new").write_text(f"{record.step} {trainer.world.size}")
            (folder / "status.new").rename(folder / "status")
        time.sleep(0.0 if (folder / "fast").exists() else 0.3)
    trainer.every(1, mark)
    for epoch in trainer.epochs(max_steps=300):
        for batch in epoch:
            step(trainer, batch)
    if trainer.is_main:
        (folder / "digest.new").write_text(digest(trainer.model.state_dict(), trainer.optimizer.state_dict()))
        (folder / "digest.new").rename(folder / "digest")
"""

CADENCE_SCRIPT = (
    SCRIPT.replace("exact=True, global_batch=16,", "strategy=pl.Cadence(anchor=2, max_anchor=4),")
    .replace("    def mark(record):", "    def mark(record):\n        samples[record.epoch] += record.num_samples")
    .replace("with trainer:", "samples = [0] * 30\nwith trainer:")
    .replace("trainer.epochs(max_steps=300)", "trainer.epochs(30)")
    .replace("digest(trainer.model.state_dict(), trainer.optimizer.state_dict())", '" ".join(map(str, samples))')
)


@dataclass
class ElasticRun:
    """The script on two hosts."""

    link: Link
    folder: Path
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, host: int, *options: str, workers: int = 1) -> subprocess.Popen[str]:
        run = ("run", "--nodes", "1:2", "--address", ADDRESS, "--workers", str(workers), *options)
        return self.command(host, *run, str(self.folder / "script.py"), str(self.folder))

    def command(self, host: int, *arguments: str) -> subprocess.Popen[str]:
        process = PreloadedPython(
            ["nsenter", f"--net=/run/netns/{self.link.namespaces[host]}", sys.executable, "-m", "paceline", *arguments],
            env={
                **os.environ,
                "PYTHONPATH": PYTHONPATH,
                "TMPDIR": str(self.folder),  # a launcher that is killed leaves its folder to the next one
                "CUDA_VISIBLE_DEVICES": "",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.launchers.append(process)
        return process

    @property
    def status(self) -> tuple[int, int]:
        """Steps, and the number of workers."""
        path = self.folder / "status"
        step, size = path.read_text().split() if path.exists() else (0, 0)
        return int(step), int(size)

    def wait_for_workers(self, count: int, process: subprocess.Popen[str]) -> None:
        wait_until(lambda: self.status[1] == count, process, 90.0)

    def finish(self, launcher: subprocess.Popen[str]) -> str:
        """Go on without pauses, to the end; returns what the launcher wrote."""
        (self.folder / "fast").touch()
        code, err = end(launcher, 90.0)
        assert code == 0, err
        return err

    def set_link(self, state: str) -> None:
        subprocess.run(["ip", "-netns", self.link.namespaces[0], "link", "set", INTERFACE, state], check=True)

    @property
    def digest(self) -> str:
        return (self.folder / "digest").read_text()


@contextmanager
def elastic_run(link: Link, folder: Path) -> Iterator[ElasticRun]:
    """After the block nothing of it is left running, also if a test failed in it."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(SCRIPT)
    run = ElasticRun(link, folder)
    try:
        yield run
    finally:
        for launcher in run.launchers:
            if launcher.poll() is None:
                family = psutil.Process(launcher.pid)
                for process in [*family.children(recursive=True), family]:
                    process.kill()
            launcher.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ElasticRun]:
    with slow_link(1000) as link, elastic_run(link, tmp_path / "run") as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of one worker."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "fast").touch()
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    subprocess.run([sys.executable, folder / "script.py", folder], env=environment, check=True, capture_output=True)
    return (folder / "digest").read_text()


def test_a_host_joins_and_its_agent_is_killed(run: ElasticRun, undisturbed: str) -> None:
    first = run.start(0)
    wait_until(lambda: run.status[0] >= 2, first, 90.0)
    second = run.start(1)
    run.wait_for_workers(2, first)
    os.kill(second.pid, signal.SIGKILL)
    run.wait_for_workers(1, first)
    run.finish(first)
    assert run.digest == undisturbed


@pytest.mark.soak
def test_a_link_is_cut_and_the_host_joins_again(run: ElasticRun, undisturbed: str) -> None:
    first = run.start(0, workers=2)
    second = run.start(1, workers=2)
    run.wait_for_workers(4, first)
    run.set_link("down")
    run.wait_for_workers(2, first)
    code, err = end(second)
    assert code == 1
    assert f"lost contact with the rendezvous at {ADDRESS}" in err
    assert "start the same command again to rejoin" in err
    run.set_link("up")
    second = run.start(1, workers=2)
    run.wait_for_workers(4, first)
    run.finish(first)
    run.finish(second)
    assert run.digest == undisturbed


@pytest.mark.soak
def test_a_store_elsewhere_outlives_the_first_host(run: ElasticRun, undisturbed: str) -> None:
    run.command(0, "rendezvous", "--address", ADDRESS)
    first = run.start(0, workers=2)
    wait_until(lambda: run.status[0] >= 2, first, 90.0)
    second = run.start(1)
    run.wait_for_workers(3, first)
    os.kill(first.pid, signal.SIGKILL)
    run.wait_for_workers(1, second)
    third = run.start(0)  # the host comes back
    run.wait_for_workers(2, second)
    run.finish(second)
    run.finish(third)
    assert run.digest == undisturbed


@pytest.mark.soak
def test_a_host_that_was_suspended_is_left_behind(run: ElasticRun, undisturbed: str) -> None:
    first, second = run.start(0), run.start(1, workers=2)
    run.wait_for_workers(3, first)
    second.send_signal(signal.SIGSTOP)
    run.wait_for_workers(1, first)
    second.send_signal(signal.SIGCONT)
    code, err = end(second)
    assert code == 1
    assert "sent no heartbeat for 1.5 s" in err
    assert "start the same command again to rejoin" in err
    assert "sent no heartbeat for 1.5 s: it is down, or the link to it: 1 worker continues" in run.finish(first)
    assert run.digest == undisturbed


@pytest.mark.soak
def test_a_host_that_is_told_to_end_leaves_after_a_step(run: ElasticRun, undisturbed: str) -> None:
    first, second = run.start(0), run.start(1, workers=2)
    run.wait_for_workers(3, first)
    second.terminate()
    run.wait_for_workers(1, first)
    assert "rank 1 left: rank 1 was asked to leave" in end(second)[1]
    run.finish(first)
    assert run.digest == undisturbed


def test_all_hosts_that_are_told_to_end_stop_after_saving(run: ElasticRun) -> None:
    """None of them leaves a run to the others."""
    (run.folder / "script.py").write_text(
        SCRIPT.replace("seed=5,", "seed=5, checkpoints=pl.Checkpoints(folder / 'c'),")
    )
    store = run.command(0, "rendezvous", "--address", ADDRESS)
    launchers = [run.start(host) for host in (0, 1)]
    run.wait_for_workers(2, launchers[0])
    for launcher in launchers:
        launcher.terminate()
    assert [end(launcher)[0] for launcher in launchers] == [75, 75]
    assert len(complete_steps(run.folder / "c")) == 1
    store.kill()


@pytest.mark.soak
@pytest.mark.parametrize("host", [0, 1])
def test_a_killed_worker_of_either_host_is_replaced(run: ElasticRun, undisturbed: str, host: int) -> None:
    launchers = [run.start(number, "--max-restarts", "1", workers=2) for number in (0, 1)]
    run.wait_for_workers(4, launchers[0])
    step = run.status[0]
    wait_until(lambda: run.status[0] >= step + 3, launchers[0])  # else those that have just joined join again
    workers_of(launchers[host])[0].kill()
    run.wait_for_workers(3, launchers[0])
    run.wait_for_workers(4, launchers[0])
    errors = [run.finish(launcher) for launcher in launchers]
    assert "was killed by SIGKILL" in errors[host]
    assert run.digest == undisturbed


@pytest.mark.soak
def test_a_host_joins_a_cadence(run: ElasticRun) -> None:
    """Steps follow measured times there, so no digest: every sample of every epoch is trained once."""
    script = run.folder / "script.py"
    script.write_text(CADENCE_SCRIPT)
    first = run.start(0)
    wait_until(lambda: run.status[0] >= 2, first, 90.0)
    second = run.start(1)
    run.wait_for_workers(2, first)
    os.kill(second.pid, signal.SIGKILL)
    run.wait_for_workers(1, first)
    third = run.start(1)
    run.wait_for_workers(2, first)
    run.finish(first)
    run.finish(third)
    assert run.digest == " ".join(["167"] * 30)


@pytest.mark.soak
def test_an_exception_ends_all_hosts(run: ElasticRun) -> None:
    script = run.folder / "script.py"
    script.write_text(
        SCRIPT.replace("    def mark(record):", "    def mark(record):\n        assert record.step < 40, 'bad'")
    )
    launchers = [run.start(0), run.start(1)]
    run.wait_for_workers(2, launchers[0])
    for launcher in launchers:
        code, err = end(launcher, 90.0)
        assert code == 1
        assert "AssertionError: bad" in err
