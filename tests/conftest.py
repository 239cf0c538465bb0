"""Fixtures for all tests: shared workers, and a check that no test leaves anything behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest
import session_shm
import torch
from hypothesis import settings
from worker_pool import WorkerPool

# The machine may be busy with something else: only the suite's own time-out judges time.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")

torch.set_num_threads(1)

OWN_SHARED_MEMORY = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """The same tests everywhere: on the CPU. `pytest -m gpu` runs the GPU's own tests, where there is one."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

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


@pytest.fixture(scope="session")
def session_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture
def pool(session_pool: WorkerPool) -> WorkerPool:
    return session_pool


@pytest.fixture(autouse=True)
def nothing_is_left_behind(
    request: pytest.FixtureRequest, private_temporary_folder: Path, session_pool: WorkerPool
) -> Iterator[None]:
    """Processes, shared memory, listening ports and temporary files: none more after a test than before."""
    has_own_memory = request.config.stash[OWN_SHARED_MEMORY]
    before = _traces(private_temporary_folder, session_pool, has_own_memory)
    yield
    # Ends of processes reach the process table a moment after their parents know.
    deadline = monotonic() + 5
    while (left := _traces(private_temporary_folder, session_pool, has_own_memory) - before) and monotonic() < deadline:
        sleep(0.02)
    assert not left, f"{request.node.nodeid} left behind: {sorted(left)}"


def _traces(temporary: Path, pool: WorkerPool, has_own_memory: bool) -> set[str]:
    me = psutil.Process()
    processes = {
        f"process {p.pid} {' '.join(_command(p))}"
        for p in me.children(recursive=True)
        if p.pid not in pool.pids and "resource_tracker" not in " ".join(_command(p))
    }
    shared_memory = session_shm.entries(is_private=has_own_memory, mark=f"TMPDIR={temporary}")
    ports = {f"port {c.laddr.port}" for c in me.net_connections() if c.status == psutil.CONN_LISTEN}
    files = {str(path) for path in temporary.iterdir()}
    return processes | shared_memory | ports | files


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
