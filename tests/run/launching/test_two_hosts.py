"""Two hosts on one machine, each a network namespace: one run, one result, one end."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from disturbed import Disturbed, end, wait_until, workers_of
from worker_pool import WorkerPool

from bench.namespaces import ADDRESSES, INTERFACE, PORT, Link, missing_slow_link, slow_link
from paceline.checkpoint.folders import complete_steps

MISSING = missing_slow_link()
needs_hosts = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

ADDRESS = f"{ADDRESSES[0]}:{PORT}"
# `paceline run` with a short timeout for lost nodes.
LAUNCHER = """
import sys
from paceline.cli.main import main
from paceline.run.launching import agent, nodes
nodes.LOST_S = 2.0
agent.CAUSE_WAIT_S = 1.0
sys.exit(main(["run", *sys.argv[1:]]))
"""
PACELINE = ("-c", LAUNCHER, "--nodes", "2", "--address", ADDRESS, "--workers")
TORCHRUN = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node")

MOUNT = 'mount --bind "$0" "$1" && shift && exec "$@"'


@dataclass(frozen=True)
class Hosts:
    """Two hosts that see the same disk, and the launchers that were started on them."""

    link: Link
    folder: Path
    launchers: list[subprocess.Popen[str]]

    def start(self, host: int, run: Disturbed, *launcher: str, disk: Path | None = None) -> subprocess.Popen[str]:
        """disk: what the host has in place of the run's folder."""
        inside = ["nsenter", f"--net=/run/netns/{self.link.namespaces[host]}"]
        if disk is not None:
            inside += ["unshare", "--mount", "sh", "-c", MOUNT, str(disk), str(run.root)]
        process = run.start(*launcher, inside=inside)
        self.launchers.append(process)
        return process

    def start_all(
        self, run: Disturbed, *options: str, workers: tuple[int, int] = (1, 1)
    ) -> list[subprocess.Popen[str]]:
        return [self.start(host, run, *PACELINE, str(num), *options) for host, num in enumerate(workers)]

    def start_apart(self, run: Disturbed, *options: str) -> list[subprocess.Popen[str]]:
        """Each host has a disk of its own where the run is saved."""
        run.root.mkdir(exist_ok=True)
        disks = [self.folder / f"disk-{host}" for host in (0, 1)]
        for disk in disks:
            disk.mkdir(exist_ok=True)
        return [self.start(host, run, *PACELINE, "1", *options, disk=disk) for host, disk in enumerate(disks)]

    def start_torchrun(self, run: Disturbed, *options: str, workers: int = 1) -> list[subprocess.Popen[str]]:
        place = ("--master-addr", ADDRESSES[0], "--master-port", str(PORT), "--log-dir", str(self.folder / "torchrun"))
        torchrun = (*TORCHRUN, str(workers))
        return [self.start(i, run, *torchrun, "--node-rank", str(i), *place, *options) for i in (0, 1)]

    def cut(self) -> None:
        subprocess.run(["ip", "-netns", self.link.namespaces[0], "link", "set", INTERFACE, "down"], check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with slow_link(1000) as link, all_ended([]) as launchers:
        yield Hosts(link, tmp_path, launchers)


@contextmanager
def all_ended(launchers: list[subprocess.Popen[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """After the block nothing of theirs is left running, also if a test failed in it."""
    try:
        yield launchers
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                family = psutil.Process(launcher.pid)
                for process in [*family.children(recursive=True), family]:
                    process.kill()
            launcher.communicate()


def run_in(folder: Path, **settings: object) -> Disturbed:
    folder.mkdir()
    return Disturbed(folder, **settings)


@pytest.fixture(scope="module")
def digest_of_one_host(session_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script of `disturbed.py` comes to on two workers of this machine."""
    root = tmp_path_factory.mktemp("one-host") / "run"

    def main() -> str:
        from models import digest
        from resumable import setup, step

        with setup(root) as trainer:
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    step(trainer, batch)
            return digest(trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.position.to_dict())

    first, second = session_pool.run(main, 2)
    assert first == second
    return first


# The same result


@pytest.mark.soak
@needs_hosts
def test_two_hosts_train_like_one(hosts: Hosts, tmp_path: Path, digest_of_one_host: str) -> None:
    run = run_in(tmp_path / "run")
    logs = tmp_path / "logs"
    for launcher in hosts.start_all(run, "--logs", str(logs)):
        code, err = end(launcher)
        assert code == 0, err
    assert run.digest == digest_of_one_host
    assert sorted(path.name for path in logs.iterdir()) == ["rank-0.err", "rank-0.out", "rank-1.err", "rank-1.out"]


@needs_hosts
@pytest.mark.parametrize("workers", [pytest.param((2, 2), marks=pytest.mark.soak), (1, 2)], ids=str)
def test_hosts_of_several_workers_train_like_one(
    hosts: Hosts, tmp_path: Path, digest_of_one_host: str, workers: tuple[int, int]
) -> None:
    """Gradients are added up inside each host first."""
    run = run_in(tmp_path / "run")
    script = run.folder / "script.py"
    script.write_text("import logging\nlogging.basicConfig(level='INFO')\n" + script.read_text())
    for launcher in hosts.start_all(run, "--logs", str(tmp_path / "logs"), workers=workers):
        code, err = end(launcher)
        assert code == 0, err
    assert run.digest == digest_of_one_host
    for log in (tmp_path / "logs").glob("*.err"):
        assert "workers exchange through shared memory inside each of 2 hosts, and over gloo between" in log.read_text()


@needs_hosts
@pytest.mark.soak
@pytest.mark.parametrize("workers", [1, 2])
def test_torchrun_on_two_hosts_trains_like_one(
    hosts: Hosts, tmp_path: Path, digest_of_one_host: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", INTERFACE)
    run = run_in(tmp_path / "run")
    launchers = hosts.start_torchrun(run, workers=workers)
    for launcher in launchers:
        code, err = end(launcher)
        assert code == 0, err
    assert run.digest == digest_of_one_host


# The same end

FAILS_ON_RANK_1 = """
import os, time
print("begun", flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("bad sample 7")
time.sleep(600)
"""


@needs_hosts
def test_a_failure_on_one_host_is_shown_on_both(hosts: Hosts, tmp_path: Path) -> None:
    """The worker on the other host takes part in no exchange that could fail."""
    run = run_in(tmp_path / "run")
    (run.folder / "script.py").write_text(FAILS_ON_RANK_1)
    launchers = hosts.start_all(run, "--logs", str(tmp_path / "logs"))
    for launcher in launchers:
        code, err = end(launcher, 100.0)
        assert code == 1
        assert "paceline run: rank 1 failed: ValueError: bad sample 7\n\nTraceback" in err
        assert f"; the output of rank 1 is in {tmp_path}/logs/rank-1.err" in err
        assert "rank 1 ran on node " in err


@needs_hosts
@pytest.mark.parametrize("workers", [(1, 1), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_a_cut_link_ends_both_hosts_in_time(workers: tuple[int, int], hosts: Hosts, tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", pause_s=0.05, timeout_s=2.0)
    launchers = hosts.start_all(run, workers=workers)
    wait_until(lambda: run.step >= 3, launchers[0])
    hosts.cut()
    for launcher in launchers:
        code, err = end(launcher)
        assert code == 1
        assert "waited timeout_s=2 s in all_reduce" in err
        assert "lost contact with " in err
    assert run.digest is None


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("victim", range(4))
def test_a_killed_worker_restarts_hosts_of_several_workers(
    hosts: Hosts, tmp_path: Path, digest_of_one_host: str, victim: int
) -> None:
    run = run_in(tmp_path / "run", pause_s=0.05, every_steps=1)
    launchers = hosts.start_all(run, "--max-restarts", "2", workers=(2, 2))
    wait_until(lambda: run.step >= 4, launchers[0])
    workers_of(launchers[victim // 2])[victim % 2].kill()
    for launcher in launchers:
        code, err = end(launcher, 100.0)
        assert code == 0, err
        assert f"paceline: restart 1: rank {victim} was killed by SIGKILL" in err
    assert run.digest == digest_of_one_host


@pytest.mark.slow
@needs_hosts
def test_torchruns_workers_say_what_they_waited_for_when_the_link_is_cut(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", INTERFACE)
    run = run_in(tmp_path / "run", pause_s=0.05, timeout_s=5.0)
    launchers = hosts.start_torchrun(run)
    wait_until(lambda: run.step >= 3, launchers[0])
    hosts.cut()
    for launcher in launchers:
        code, err = end(launcher)
        assert code == 1
        assert "CommunicationTimeout" in err
        assert "waited timeout_s=5 s in all_reduce, and not all 2 workers arrived" in err


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_restarts_both_hosts(
    hosts: Hosts, tmp_path: Path, digest_of_one_host: str, victim: int
) -> None:
    run = run_in(tmp_path / "run", pause_s=0.05, every_steps=1)
    launchers = hosts.start_all(run, "--max-restarts", "2")
    wait_until(lambda: run.step >= 4, launchers[0])
    workers_of(launchers[victim])[0].kill()
    for launcher in launchers:
        code, err = end(launcher, 100.0)
        assert code == 0, err
        assert f"paceline: restart 1: rank {victim} was killed by SIGKILL" in err
        assert "restart 2" not in err
    assert run.digest == digest_of_one_host


@pytest.mark.soak
@needs_hosts
def test_hosts_with_disks_of_their_own_go_on_from_what_both_have(
    hosts: Hosts, tmp_path: Path, digest_of_one_host: str
) -> None:
    run = run_in(tmp_path / "run", pause_s=0.05, every_steps=2, keep_last=None, disk="per node")
    launchers = hosts.start_apart(run)
    wait_until(lambda: run.step >= 7, launchers[0])
    launchers[1].send_signal(signal.SIGTERM)
    assert [end(launcher)[0] for launcher in launchers] == [75, 75]
    saved = [complete_steps(tmp_path / f"disk-{host}") for host in (0, 1)]
    assert saved[0] == saved[1]
    assert not list(run.root.iterdir())  # nobody wrote to what the hosts have in common
    # One host lost its newest: both go on from the newest that each of them has.
    shutil.rmtree(tmp_path / "disk-1" / f"step-{saved[1][-1]:08d}")
    for launcher in hosts.start_apart(run):
        code, err = end(launcher, 100.0)
        assert code == 0, err
    assert run.digest == digest_of_one_host


@pytest.mark.slow
@needs_hosts
def test_torchrun_restarts_both_hosts(
    hosts: Hosts, tmp_path: Path, digest_of_one_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", INTERFACE)
    run = run_in(tmp_path / "run", pause_s=0.05, every_steps=1)
    launchers = hosts.start_torchrun(run, "--max-restarts", "2")
    wait_until(lambda: run.step >= 4, launchers[0])
    workers_of(launchers[1])[0].kill()
    for launcher in launchers:
        code, err = end(launcher, 100.0)
        assert code == 0, err
    assert run.digest == digest_of_one_host


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_whose_launcher_dies_ends_the_other(hosts: Hosts, tmp_path: Path, victim: int) -> None:
    run = run_in(tmp_path / "run", pause_s=0.05)
    launchers = hosts.start_all(run, "--max-restarts", "2")
    wait_until(lambda: run.step >= 3, launchers[0])
    launchers[victim].kill()
    code, err = end(launchers[1 - victim])
    assert code == 1
    assert f"rank {1 - victim} lost contact with the other workers" in err
    assert "lost contact with " in err.partition("ran on node")[2]


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_on_one_host_stops_both_after_saving(hosts: Hosts, tmp_path: Path, asked: int) -> None:
    run = run_in(tmp_path / "run", pause_s=0.05)
    launchers = hosts.start_all(run, "--max-restarts", "2")
    wait_until(lambda: run.step >= 3, launchers[0])
    launchers[asked].send_signal(signal.SIGTERM)
    for launcher in launchers:
        code, err = end(launcher)
        assert code == 75, err
        assert "Traceback" not in err
    assert len(complete_steps(run.root)) == 1
