"""Whether what a process allocates lies on huge pages, seen from what the system says about its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.run import host_memory
from paceline.run.host_memory import SWITCH, huge_pages_obstacle

# In a process of its own: there is no way back.
PROGRAM = """
import re, sys
from pathlib import Path
import numpy
from paceline.run import host_memory

before = len(host_memory.heap())
if sys.argv[1] == "use":
    host_memory.keep_freed_memory()
    host_memory.use_huge_pages()
status = Path("/proc/self/status").read_text()
touched = int(re.search(r"RssAnon:\\s+(\\d+)", status)[1])
tensors = [numpy.ones(1 << 20, numpy.uint8) for _ in range(64)]  # of larger ones numpy itself takes care
smaps = Path("/proc/self/smaps").read_text()
huge = sum(map(int, re.findall(r"AnonHugePages:\\s+(\\d+)", smaps)))
print((len(host_memory.heap()) - before) >> 20, touched >> 10, huge >> 10)
"""


def megabytes_of(way: str) -> tuple[int, ...]:
    """How much longer the heap is, what is in memory before the tensors come, and what is on huge pages then."""
    environment = {"PATH": "/usr/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(host_memory.__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, way], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return tuple(map(int, ended.stdout.split()))


@pytest.mark.skipif(huge_pages_obstacle() is not None, reason=str(huge_pages_obstacle()))
def test_tensors_come_on_huge_pages_and_the_longer_heap_takes_no_memory() -> None:
    _, touched_before, none = megabytes_of("leave")
    longer, touched, huge = megabytes_of("use")
    assert huge >= none + 16  # of 64 MB; where no huge page is free, small ones come
    assert longer >= 512
    assert touched - touched_before < 32


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert huge_pages_obstacle() == f"{SWITCH}=0"


def test_what_the_user_has_told_the_c_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert huge_pages_obstacle() == "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 says how to handle it"


@pytest.mark.parametrize(
    ("mode", "overcommit", "reason"),
    [
        ("always [madvise] never", "0", None),
        ("[always] madvise never", "0", "says [always] madvise never"),
        ("always madvise [never]", "0", "says always madvise [never]"),
        ("always [madvise] never", "2", "is 2, so addresses count as memory"),
    ],
)
def test_modes(mode: str, overcommit: str, reason: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, text in (("_MODE", mode), ("_OVERCOMMIT", overcommit)):
        file = tmp_path / name
        file.write_text(text + "\n")
        monkeypatch.setattr(host_memory, name, file)
    found = huge_pages_obstacle()
    assert found is None if reason is None else str(found).endswith(reason)


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "_MODE", tmp_path / "absent")
    assert huge_pages_obstacle() == f"{tmp_path / 'absent'} cannot be read"


def test_a_process_without_a_heap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f0000000000-7f0000001000 rw-p 00000000 00:00 0 [stack]\n")
    monkeypatch.setattr(host_memory, "_MAPS", maps)
    assert host_memory.heap() == range(0)
    assert host_memory._lengthen_heap() == "the heap has 0 MB and does not grow"


def test_the_heap_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "55d0c0000000-55d0c0001000 r-xp 00000000 00:00 0 /usr/bin/python3\n"
        "55d0c1000000-55d0c3000000 rw-p 00000000 00:00 0                          [heap]\n"
    )
    monkeypatch.setattr(host_memory, "_MAPS", maps)
    assert host_memory.heap() == range(0x55D0C1000000, 0x55D0C3000000)
