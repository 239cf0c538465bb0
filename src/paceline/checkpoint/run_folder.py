"""A run's folders: the one on disk that the user chose, and one in memory for snapshots that a restart finds.

The folder in memory lies under /dev/shm on every node and outlives the workers, not the machine. Its name holds the
path of the run's folder and an identifier that lies in it: a run that is begun anew after its folder was deleted does
not find the snapshots of the one before.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from paceline.checkpoint.folders import clean_up, complete_steps, set_aside, step_folder, unusable
from paceline.checkpoint.hashed_file import flush_folder, write_file
from paceline.checkpoint.lock import RunLock
from paceline.checkpoint.pieces import Disk, writers
from paceline.comm.base import Communicator
from paceline.comm.messages import decided_by_rank_0, wait_for_all

MEMORY = Path("/dev/shm")
IDENTIFIER_NAME = ".run-id"
# How long the lock of a run that was just killed may take to be released.
LOCK_PATIENCE_S = 10.0

_IDENTIFIER = re.compile(r"[0-9a-f]{16}")

Where = Literal["disk", "memory"]


class RunFolder:
    """The folders, locked for this run until `close`. Every worker of the world makes one, at the same point."""

    def __init__(self, root: Path, communicator: Communicator, disk: Disk) -> None:
        world = communicator.world
        self.root = root
        self._owns_root = world.rank == writers(world, disk)[0]
        self._owns_memory = world.local_rank == 0
        self._held = ExitStack()
        with ExitStack() as undo:
            undo.callback(self.close)
            identifier: str = decided_by_rank_0(self._open, communicator)
            if self._owns_root and not world.is_main:
                self._open()
            self.memory = memory_folder(root, identifier)
            if self._owns_memory:
                _remove_outdated(self.memory)
                clean_up(self.memory)
            wait_for_all(communicator)
            undo.pop_all()

    def _open(self) -> str:
        self.root.mkdir(parents=True, exist_ok=True)
        self._held.enter_context(RunLock(self.root, patience_s=LOCK_PATIENCE_S))
        clean_up(self.root)
        return _identifier(self.root)

    def make_memory(self) -> None:
        if self._owns_memory:
            self.memory.mkdir(mode=0o700, exist_ok=True)

    def found(self) -> list[tuple[Where, int]]:
        """The checkpoints that this worker sees."""
        on_disk: list[tuple[Where, int]] = [("disk", step) for step in complete_steps(self.root)]
        return on_disk + [("memory", step) for step in complete_steps(self.memory)]

    def unusable(self) -> dict[str, str]:
        """What looks like a checkpoint in the folder on disk and is none, by its path, with the reason."""
        return {str(path): reason for path, reason in unusable(self.root).items()}

    def path(self, where: Where, step: int) -> Path:
        return step_folder(self.root if where == "disk" else self.memory, step)

    def forget(self, steps: Iterable[int]) -> Path | None:
        """These steps are not to be found any more: moved aside on disk (returns where to), deleted in memory."""
        gone = set(steps)
        if self._owns_memory:
            for step in gone.intersection(complete_steps(self.memory)):
                shutil.rmtree(step_folder(self.memory, step))
        return set_aside(self.root, gone.intersection(complete_steps(self.root))) if self._owns_root else None

    def remove_memory(self) -> None:
        if self._owns_memory:
            shutil.rmtree(self.memory, ignore_errors=True)

    def close(self) -> None:
        self._held.close()


def memory_folder(root: Path, identifier: str) -> Path:
    place = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    return MEMORY / f"paceline-{place}-{identifier}"


def _identifier(root: Path) -> str:
    """What tells this run from another in the same place: made once, kept from resumption to resumption."""
    path = root / IDENTIFIER_NAME
    if path.is_file() and _IDENTIFIER.fullmatch(found := path.read_text(errors="replace").strip()):
        return found
    made = secrets.token_hex(8)
    unfinished = path.with_name(f"{IDENTIFIER_NAME}.new")
    unfinished.unlink(missing_ok=True)
    write_file(unfinished, f"{made}\n".encode())
    unfinished.replace(path)
    flush_folder(root)
    return made


def _remove_outdated(current: Path) -> None:
    """Snapshots of runs that were in this place before."""
    place = current.name.rpartition("-")[0]
    for folder in MEMORY.glob(f"{place}-*"):
        if folder != current:
            shutil.rmtree(folder, ignore_errors=True)
