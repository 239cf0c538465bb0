"""The test session's own shared memory, so that what other programs on the machine put into /dev/shm is not counted.

As root the session gets a /dev/shm of its own, in a mount namespace that its child processes inherit. Elsewhere the
entries of other users, and those that a process of another session has open or mapped, are left out.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")

_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_SLAVE = 0x2, 0x4, 0x4000, 0x80000


def make_private() -> bool:
    """Mount an empty /dev/shm for this process and those it starts from now on; whether that was possible."""
    if os.environ.get("PACELINE_TESTS_SHARE_SHM") or os.geteuid() != 0 or not SHARED_MEMORY.is_dir():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    usage = os.statvfs(SHARED_MEMORY)
    options = f"mode=1777,size={usage.f_blocks * usage.f_frsize}".encode()
    if libc.unshare(_CLONE_NEWNS) != 0:
        return False
    # Mounts made inside stay inside; those made outside still come in.
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None) != 0:
        return False
    return bool(libc.mount(b"tmpfs", bytes(SHARED_MEMORY), b"tmpfs", _MS_NOSUID | _MS_NODEV, options) == 0)


def entries(*, is_private: bool, mark: str) -> set[str]:
    """What this session has in /dev/shm. `mark`: an environment variable, NAME=value, that all its processes have."""
    names = {str(path) for path in SHARED_MEMORY.iterdir()}
    if is_private or not names:
        return names
    return {name for name in names if _is_own(name)} - set(_held_by_others(mark.encode()))


def _is_own(name: str) -> bool:
    with suppress(OSError):
        return Path(name).stat().st_uid == os.geteuid()
    return False  # it is gone


def _held_by_others(mark: bytes) -> Iterator[str]:
    for pid in psutil.pids():
        folder = Path(f"/proc/{pid}")
        with suppress(OSError):  # it has ended, or is another user's
            if pid == os.getpid() or mark in (folder / "environ").read_bytes().split(b"\0"):
                continue
            for line in (folder / "maps").read_text().splitlines():
                yield line[line.find(str(SHARED_MEMORY)) :]
            for link in (folder / "fd").iterdir():
                yield str(link.readlink())
