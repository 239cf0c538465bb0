"""A lock on a run folder: one run writes into it at a time.

The kernel holds the lock for the process and releases it when the process ends, however it ends, so a lock left
behind by a crash does not exist. Between machines it holds where the shared file system passes `flock` on, as NFS
(version 4, or 3 with its lock service) and Lustre mounted with `flock` do; with `localflock`, and on some FUSE file
systems, only processes of one machine keep each other out.
"""

from __future__ import annotations

import fcntl
import os
import socket
from datetime import datetime
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Self

from paceline.checkpoint.errors import LockedError

LOCK_NAME = ".lock"
_POLL_S = 0.1

_held: set[int] = set()


class RunLock:
    """The lock on `folder`, held from construction to `close()` or the end of the `with` block.

    Raises `LockedError` naming the holder if somebody else has it, and keeps it for `patience_s`: the killed worker
    whose place this one takes may not be quite gone. For one worker per folder to take.
    """

    def __init__(self, folder: Path, *, patience_s: float = 0.0) -> None:
        self.path = folder / LOCK_NAME
        self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if not _lock(self._descriptor, patience_s):
            holder = os.pread(self._descriptor, 1000, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise LockedError(
                f"{folder} is in use by {holder or 'another process'}: wait until that run has ended, stop it, or "
                "choose another folder"
            )
        _held.add(self._descriptor)
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)

    def close(self) -> None:
        if self._descriptor is not None:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _lock(descriptor: int, patience_s: float) -> bool:
    deadline = monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() >= deadline:
                return False
            sleep(_POLL_S)
        else:
            return True


def _let_go_in_child() -> None:
    """A forked data-loading process must not hold the lock when the worker that forked it is gone."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
