"""Whether a process keeps the memory that it frees, seen from how often it asks the system for a page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.run import host_memory
from paceline.run.host_memory import obstacle

# Without torch, which takes seconds to import and allocates as numpy does.
PROGRAM = f"""
import importlib.util, resource, sys
import numpy
spec = importlib.util.spec_from_file_location("host_memory", {str(Path(host_memory.__file__))!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
if sys.argv[1] == "keep":
    module.keep_freed_memory()

def step():
    return [numpy.ones(2 << 20, numpy.uint8) for _ in range(8)] and None

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_asked_for(way: str) -> int:
    environment = {"PATH": "/usr/bin", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, way], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return int(ended.stdout)


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_a_step_uses_the_memory_that_the_last_one_freed() -> None:
    assert pages_asked_for("leave") > 10_000  # 16 MB in each of ten steps are 40,000 pages
    assert pages_asked_for("keep") < 1_000


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072")]
)
def test_what_the_user_has_told_the_c_library_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert obstacle() == f"{name}={value} says how to handle it"


def test_other_tunables_are_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    if obstacle() is not None:
        pytest.skip(str(obstacle()))
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
    assert obstacle() is None


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.os, "confstr_names", {})
    assert obstacle() == "this system's C library is not glibc"
