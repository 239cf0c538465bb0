"""A limit on the CPU time of worker processes: a cgroup (v1) with a quota, there for as long as a `with` block."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 100_000


@dataclass(frozen=True)
class CpuQuota:
    """A group of processes that share a limit. A value: whoever knows the folder may add itself or change the limit."""

    folder: Path

    def add(self, pid: int) -> None:
        """Move a process with all its threads into the group."""
        _write(self.folder / "cgroup.procs", pid)

    def limit(self, cores: float | None) -> None:
        """Let the group have so much of a core in every period of 100 ms, from now on; None: as much as it likes."""
        _write(self.folder / "cpu.cfs_quota_us", -1 if cores is None else round(cores * PERIOD_US))


@contextmanager
def cpu_quota(cores: float | None = None) -> Iterator[CpuQuota]:
    """An empty group with this limit. At the end the group is gone and who was in it runs on without a limit."""
    folder = Path(tempfile.mkdtemp(prefix=f"paceline-bench-{os.getpid()}-", dir=ROOT))
    try:
        _write(folder / "cpu.cfs_period_us", PERIOD_US)
        quota = CpuQuota(folder)
        quota.limit(cores)
        yield quota
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):  # it has ended since
                _write(ROOT / "cgroup.procs", int(pid))
        folder.rmdir()


def missing_cpu_quota() -> str | None:
    """Why processes cannot be limited here; None if they can."""
    try:
        with cpu_quota(0.5):
            return None
    except OSError as error:
        return f"a cgroup (v1) with a cpu quota cannot be made in {ROOT}; it takes root and the cpu controller: {error}"


def _write(path: Path, value: int) -> None:
    with path.open("r+") as file:  # never creates it: a missing file is a missing controller
        file.write(str(value))
