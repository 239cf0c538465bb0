"""Fixtures for all tests: shared workers, and a check that no test leaves anything behind."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import preloaded_python
import psutil
import pytest
import session_shm
import torch
from hypothesis import settings
from worker_pool import WorkerPool

from paceline.run.launching import fork_server

# The machine may be busy with something else: only the suite's own time-out judges time.
settings.register_profile("paceline", deadline=None, max_examples=40)
settings.register_profile("soak", deadline=None, max_examples=500)  # `make soak`
settings.load_profile("paceline")

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in processes that the tests start

OWN_SHARED_MEMORY = pytest.StashKey[bool]()
TRACES = pytest.StashKey[set[str] | None]()  # as they were after the last test, if nothing was set up since


def pytest_configure(config: pytest.Config) -> None:
    """The same tests everywhere: on the CPU. `pytest -m gpu` runs the GPU's own tests, where there is one."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A shell starts what it runs in the background with SIGINT ignored, and processes inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[OWN_SHARED_MEMORY] = session_shm.make_private()


@pytest.fixture(scope="session", autouse=True)
def private_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Everything that asks for a temporary folder, here or in a child process, gets it inside this one."""
    folder = tmp_path_factory.mktemp("temporary")
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    # torch's compiler keeps its cache there for good, which is its business.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))
    tempfile.tempdir = None
    yield folder
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before
    tempfile.tempdir = None


@pytest.fixture
def plain_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how launched processes start."""
    monkeypatch.setattr(fork_server, "subprocess", subprocess)


@pytest.fixture(scope="session")
def session_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    with preloaded_python.use():
        yield pool
        pool.close()


@pytest.fixture
def pool(session_pool: WorkerPool) -> WorkerPool:
    return session_pool


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    if fixturedef.scope != "function":
        request.config.stash[TRACES] = None


@pytest.fixture(autouse=True)
def nothing_is_left_behind(
    request: pytest.FixtureRequest, private_temporary_folder: Path, session_pool: WorkerPool
) -> Iterator[None]:
    """Processes, shared memory, listening ports and temporary files: none more after a test than before."""
    stash = request.config.stash

    def traces() -> set[str]:
        return _traces(private_temporary_folder, session_pool, stash[OWN_SHARED_MEMORY])

    before = stash.get(TRACES, None)
    if before is None:
        before = traces()
    yield
    # Ends of processes reach the process table a moment after their parents know.
    deadline = monotonic() + 5
    while (left := (after := traces()) - before) and monotonic() < deadline:
        sleep(0.02)
    stash[TRACES] = after
    assert not left, f"{request.node.nodeid} left behind: {sorted(left)}"


def _traces(temporary: Path, pool: WorkerPool, has_own_memory: bool) -> set[str]:
    me = psutil.Process()
    shared = {*pool.pids, preloaded_python.SEED.pid}
    processes = {
        f"process {pid} {command}"
        for pid in _descendants(me.pid)
        if pid not in shared and "resource_tracker" not in (command := _command(pid))
    }
    shared_memory = session_shm.entries(is_private=has_own_memory, mark=f"TMPDIR={temporary}")
    ports = {f"port {c.laddr.port}" for c in me.net_connections() if c.status == psutil.CONN_LISTEN}
    files = {str(path) for path in temporary.iterdir()}
    return processes | shared_memory | ports | files


def _descendants(pid: int) -> set[int]:
    """As `psutil.Process.children(recursive=True)`, which takes four times as long: it is called after every test."""
    parents = {each: _parent(each) for each in psutil.pids()}
    found: set[int] = set()
    while more := {each for each, parent in parents.items() if parent == pid or parent in found} - found:
        found |= more
    return found


def _parent(pid: int) -> int:
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            return int(
                os.read(fd, 512).rpartition(b")")[2].split()[1]
            )  # the name in parentheses may have any character
        finally:
            os.close(fd)
    except (OSError, IndexError):  # it has ended
        return 0


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""
