"""Allocator settings of the processes that Paceline starts, seen in their page faults and huge pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.run.launching import fork_server
from paceline.run.launching.allocator import SWITCH, TUNABLES, VARIABLE, allocator_environment
from paceline.run.launching.launch import launch

pytestmark = pytest.mark.usefixtures("plain_processes")

OURS = ":".join(f"{name}={value}" for name, value in TUNABLES.items())
THP_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {VARIABLE: OURS}),
        ({VARIABLE: "glibc.pthread.rseq=0"}, {VARIABLE: f"glibc.pthread.rseq=0:{OURS}"}),
        ({VARIABLE: "glibc.malloc.hugetlb=2"}, {}),
        ({VARIABLE: OURS}, {}),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, {}),
        ({SWITCH: "0"}, {}),
        ({SWITCH: "1"}, {VARIABLE: OURS}),
    ],
)
def test_what_is_added_to_an_environment(given: dict[str, str], added: dict[str, str]) -> None:
    assert allocator_environment(given) == added


def measure() -> tuple[int, int]:
    """Page faults of ten steps that allocate and free 16 MB each, and megabytes on huge pages."""
    import re
    import resource

    import numpy

    def step() -> None:
        _ = [numpy.ones(2 << 20, numpy.uint8) for _ in range(8)]

    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    # Of larger arrays numpy itself requests huge pages.
    kept = [numpy.ones(1 << 20, numpy.uint8) for _ in range(64)]
    smaps = Path("/proc/self/smaps").read_text()
    assert len(kept) == 64
    return faults, sum(map(int, re.findall(r"AnonHugePages:\s+(\d+)", smaps))) >> 10


def test_workers_keep_freed_memory_on_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names or not allocator_environment():
        pytest.skip("not glibc, or the allocator is set up already")
    monkeypatch.setattr(fork_server, "PRELOADED_MODULES", ())
    faults, huge = launch(measure, 2)
    monkeypatch.setenv(SWITCH, "0")
    faults_off, huge_off = launch(measure, 2)
    assert faults < 1_000
    assert faults_off > 5_000  # 16 MB in each of ten steps are 40,000 pages
    if "[madvise]" in THP_MODE.read_text():
        assert huge >= huge_off + 16  # of 64 MB; without a free huge page the kernel gives small ones


def test_the_command_restarts_itself_with_the_settings(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\nprint(os.getpid(), os.environ.get({VARIABLE!r}), *sys.argv[1:])\n")
    for switch, expected in (("1", OURS), ("0", "None")):
        words = [sys.executable, "-m", "paceline", "run", "--workers", "1", str(script), "a b"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        environment = {name: value for name, value in environment.items() if name != VARIABLE} | {SWITCH: switch}
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, f"{process.pid} {expected} a b\n")
