"""A key-value store in a folder, for the rendezvous of workers of one host.

torch's FileStore appends all values to one file. If a process is killed while it writes there, every other process that
opens or reads the store hangs in it, without an end. Here each value is a file that is renamed into place.
"""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from time import sleep

import torch.distributed as dist

from paceline.core.timing import ActiveTimer

POLL_S = 0.001
TIMEOUT = timedelta(seconds=300)


class FolderStore(dist.Store):  # type: ignore[misc,name-defined]
    """The folder is created if it is missing, and belongs to the caller. Keys may be any texts."""

    def __init__(self, folder: Path, timeout: timedelta = TIMEOUT) -> None:
        super().__init__()
        self._folder = folder
        self._timeout = timeout
        folder.mkdir(exist_ok=True)

    def set(self, key: str, value: str | bytes) -> None:
        unfinished = self._folder / f"{secrets.token_hex(8)}.new"
        unfinished.write_bytes(value.encode() if isinstance(value, str) else bytes(value))
        unfinished.replace(self._file(key))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._file(key).read_bytes()

    def add(self, key: str, amount: int) -> int:
        with (self._folder / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the kernel releases it if this process is killed
            total = amount + (int(self._file(key).read_bytes()) if self.check([key]) else 0)
            self.set(key, str(total))
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._file(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s, waited = (timeout or self._timeout).total_seconds(), ActiveTimer()
        while not self.check(keys):
            if waited.update() > limit_s:
                missing = [key for key in keys if not self.check([key])]
                raise RuntimeError(f"{', '.join(missing)} did not arrive within {limit_s:g} s")
            sleep(POLL_S)

    def delete_key(self, key: str) -> bool:
        with suppress(FileNotFoundError):
            self._file(key).unlink()
            return True
        return False

    def clone(self) -> FolderStore:
        return FolderStore(self._folder, self._timeout)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _file(self, key: str) -> Path:
        return self._folder / sha256(key.encode()).hexdigest()
