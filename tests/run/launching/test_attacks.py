"""Another user of the host, or of another host, does no harm to a run: no code of theirs is executed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import preloaded_python
import pytest
from test_two_hosts import ADDRESS, Hosts, needs_hosts
from test_two_hosts import hosts as hosts_fixture

from bench.namespaces import ADDRESSES

TESTS = Path(__file__).parents[2]
HERE = Path(__file__).parent

hosts = hosts_fixture
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")

DELAY_S = "2"
# Rank 0 comes late, so that somebody else may come in its place. `Thing` is what only pickle can hold.
VICTIM = """
import os, sys, time
import torch
from torch import nn
import paceline as pl

class Thing:
    def __init__(self, x):
        self.x = x

class Data:
    def __len__(self):
        return 32
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((4,), float(index))

kind, delay_s = sys.argv[1], float(sys.argv[2])
if os.environ.get("RANK") == "0":
    time.sleep(delay_s)
with pl.Trainer.setup(
    lambda: nn.Linear(4, 1), lambda parameters: torch.optim.SGD(parameters, lr=1e-4), data=Data(), exact=True,
    loading=pl.Loading(
        collate_fn=lambda s: Thing(torch.stack(s)) if kind == "thing" else torch.stack(s), feed="dispatched"
    ),
    global_batch=8, micro_batch=2, runtime=pl.Runtime(timeout_s=20.0),
) as trainer:
    for epoch in trainer.epochs(2):
        for batch in epoch:
            x = batch.x if kind == "thing" else batch
            trainer.backward(trainer.model(x).square().mean())
            trainer.step()
    weights = trainer.gather([p.tolist() for p in trainer.model.parameters()])
    if trainer.is_main:
        print("weights", weights[0], flush=True)
"""


def start_attacker(folder: Path, namespace: str, addresses: tuple[str, ...]) -> subprocess.Popen[bytes]:
    folder.mkdir()
    folder.chmod(0o777)
    environment = {**os.environ, "TMPDIR": str(folder.parent), "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [*inside(namespace), sys.executable, str(HERE / "attacker.py"), str(folder), *addresses]
    with (folder / "output").open("w") as output:
        return subprocess.Popen(words, env=environment, stdout=output, stderr=output)


def inside(namespace: str) -> tuple[str, ...]:
    return "nsenter", f"--net=/run/netns/{namespace}"


@contextmanager
def attacked(folder: Path, namespace: str, *addresses: str) -> Iterator[None]:
    """While somebody tries to do harm; what was planted must not have been executed."""
    process = start_attacker(folder, namespace, addresses)
    try:
        deadline_s = time.monotonic() + 60
        while not (folder / "ready").exists():
            assert process.poll() is None, (folder / "output").read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        yield
    finally:
        (folder / "stop").touch()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
    assert not (folder / "harm").exists(), "code of another user was executed"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory(prefix="paceline-attack-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    script = tmp_path / "victim.py"
    script.write_text(VICTIM)
    return script


def run(words: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", **more}
    return preloaded_python.run(words, env=environment, capture_output=True, text=True, timeout=100, check=False)


def weights_of_one_worker(victim: Path, folder: Path) -> str:
    return weights_of(run([sys.executable, str(victim), "plain", "0"], folder).stdout)


def weights_of(output: str) -> str:
    [line] = [line for line in output.splitlines() if line.startswith("weights")]
    return line


@needs_root
@needs_hosts
@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.soak), "thing"])
def test_another_user_of_the_host_does_no_harm(kind: str, victim: Path, tmp_path: Path, hosts: Hosts) -> None:
    """There is no port to connect to, no file to read, and a Unix socket hears only its own user."""
    namespace = hosts.link.namespaces[0]  # where nothing else runs
    paceline = [sys.executable, "-m", "paceline", "run", "--workers", "2", str(victim), kind, DELAY_S]
    with attacked(tmp_path / "attacker", namespace, "127.0.0.1"):
        ended = run([*inside(namespace), *paceline], tmp_path)
    assert ended.returncode == 0, ended.stderr
    reached = json.loads((tmp_path / "attacker" / "reached").read_text())
    assert reached["ports"] == []
    assert reached["files"] == []
    assert weights_of(ended.stdout) == weights_of_one_worker(victim, tmp_path)


@needs_root
@needs_hosts
@pytest.mark.soak
@pytest.mark.parametrize("secret", [True, False])
def test_another_user_of_another_host_does_no_harm(
    secret: bool,
    victim: Path,
    tmp_path: Path,
    hosts: Hosts,
) -> None:
    """He can reach the store, and make a run fail, but not make it run his code, nor in silence go wrong."""
    outcomes = two_hosts(victim, tmp_path, hosts, "plain", secret, is_attacked=True)
    for code, _, err in outcomes:
        assert code in (0, 1), err
        if code == 1:
            assert "paceline run: " in err, err
    if outcomes[0][0] == 0:
        assert weights_of(outcomes[0][1]) == weights_of_one_worker(victim, tmp_path)


@needs_hosts
def test_pickles_between_hosts_are_refused_without_a_secret(victim: Path, tmp_path: Path, hosts: Hosts) -> None:
    for code, _, err in two_hosts(victim, tmp_path, hosts, "thing", False, is_attacked=False):
        assert code == 1
        assert "this run has no secret: any process that can reach 10.0.0.1:29500 can join" in err
        assert "is a __main__.Thing, which cannot be stored without pickle" in err
        assert "give the run a secret (--secret-file, or the variable PACELINE_SECRET_FILE under torchrun" in err


@needs_hosts
def test_pickles_between_hosts_with_a_secret(victim: Path, tmp_path: Path, hosts: Hosts) -> None:
    (code, out, err), (other_code, _, _) = two_hosts(victim, tmp_path, hosts, "thing", True, is_attacked=False)
    assert (code, other_code) == (0, 0), err
    assert "no secret" not in err
    assert weights_of(out)


def two_hosts(
    victim: Path,
    folder: Path,
    hosts: Hosts,
    kind: str,
    secret: bool,
    *,
    is_attacked: bool,
) -> list[tuple[int, str, str]]:
    path = folder / "secret"
    path.write_text("0123456789abcdef" * 2)
    path.chmod(0o600)
    options = ("--secret-file", str(path)) if secret else ()
    words = ["-m", "paceline", "run", "--nodes", "2", "--address", ADDRESS, "--join-timeout", "60", "--workers", "1"]

    def start(host: int) -> subprocess.Popen[str]:
        process = preloaded_python.PreloadedPython(
            [
                *inside(hosts.link.namespaces[host]),
                sys.executable,
                *words,
                *options,
                str(victim),
                kind,
                DELAY_S if is_attacked else "0",
            ],
            env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        hosts.launchers.append(process)
        return process

    def end_all() -> list[tuple[int, str, str]]:
        outcomes = []
        for launcher in [start(0), start(1)]:
            out, err = launcher.communicate(timeout=150)
            outcomes.append((launcher.returncode, out, err))
        return outcomes

    if not is_attacked:
        return end_all()
    # He is on host 1, and tries the store on host 0 and what is open on his own.
    with attacked(folder / "attacker", hosts.link.namespaces[1], *ADDRESSES):
        return end_all()
