"""A run's folders: the one on disk that the user chose, and one in memory for snapshots that a restart finds.

The folder in memory lies under /dev/shm on every node and outlives the workers, not the machine. Its name holds the
path of the run's folder and an identifier that lies in it: a run that is begun anew after its folder was deleted does
not find the snapshots of the one before. Others can compute the name and make the folder first: it is looked at only
if it is this user's own and closed to everybody else.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import clean_up, complete_steps, set_aside, step_folder, unusable
from paceline.checkpoint.hashed_file import flush_folder, write_file
from paceline.checkpoint.lock import RunLock
from paceline.checkpoint.pieces import Disk, writers
from paceline.comm.base import Communicator
from paceline.comm.messages import decided_by_rank_0, gather
from paceline.core.private_folder import private_folder, why_not_private

logger = logging.getLogger("paceline")

MEMORY = Path("/dev/shm")
IDENTIFIER_NAME = ".run-id"
# How long the lock of a run that was just killed may take to be released.
LOCK_PATIENCE_S = 10.0

# How long a worker that leaves waits for the lock, to remove what was being saved: the owner may just be leaving too.
ABANDONED_PATIENCE_S = 0.5

_IDENTIFIER = re.compile(r"[0-9a-f]{16}")

Where = Literal["disk", "memory"]


class RunFolder:
    """The folders, locked for this run until `close`. Every worker of the world makes one, at the same point.

    `with_memory`: the run keeps snapshots, so those of an earlier start count. Without, what it left is removed.
    """

    def __init__(self, root: Path, communicator: Communicator, disk: Disk, *, with_memory: bool = False) -> None:
        world = communicator.world
        self.root = root
        self._communicator = communicator
        self._has_memory = with_memory
        self._owns_root = world.rank == writers(world, disk)[0]
        self._owns_memory = world.local_rank == 0
        self._held = ExitStack()
        with ExitStack() as undo:
            undo.callback(self.close)
            identifier = ""
            with failing_together(communicator):
                if self._owns_root:
                    identifier = self._open()
            self.memory = memory_folder(root, decided_by_rank_0(lambda: identifier, communicator))
            with failing_together(communicator):
                if self._owns_memory:
                    self._tidy_memory()
            undo.pop_all()

    def _open(self) -> str:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._held.enter_context(RunLock(self.root, patience_s=LOCK_PATIENCE_S))
            clean_up(self.root)
            return _identifier(self.root)
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be saved in {self.root}: {error.strerror} ({error.filename}); choose a folder "
                "that this user can write to"
            ) from error

    def _tidy_memory(self) -> None:
        """Remove the snapshots that no longer count, and check the folder of those that do. Only ever our own."""
        place = self.memory.name.rpartition("-")[0]
        for folder in MEMORY.glob(f"{place}-*"):
            is_current = folder == self.memory
            if reason := why_not_private(folder):
                if is_current and self._has_memory:
                    raise CheckpointError(
                        f"{folder} is not a private folder of this user: {reason}; remove it, or keep no snapshots in "
                        "memory (snapshot_every=None)"
                    )
                logger.warning("%s is not used: %s", folder, reason)
            elif not is_current or not self._has_memory:
                if is_current and complete_steps(folder):
                    logger.warning("the snapshots in %s are removed: snapshot_every=None", folder)
                shutil.rmtree(folder, ignore_errors=True)
            else:
                clean_up(folder)

    def make_memory(self) -> None:
        """For the snapshots to come. Every worker calls it, and returns when the folder is there."""
        assert self._has_memory
        with failing_together(self._communicator):
            if self._owns_memory:
                private_folder(self.memory)

    def found(self) -> list[tuple[Where, int]]:
        """The checkpoints that this worker sees."""
        on_disk: list[tuple[Where, int]] = [("disk", step) for step in complete_steps(self.root)]
        return on_disk + [("memory", step) for step in self._in_memory()]

    def _in_memory(self) -> list[int]:
        is_own = self._has_memory and why_not_private(self.memory) is None
        return complete_steps(self.memory) if is_own else []

    def unusable(self) -> dict[str, str]:
        """What looks like a checkpoint in the folder on disk and is none, by its path, with the reason."""
        return {str(path): reason for path, reason in unusable(self.root).items()}

    def path(self, where: Where, step: int) -> Path:
        return step_folder(self.root if where == "disk" else self.memory, step)

    def forget(self, steps: Iterable[int]) -> Path | None:
        """These steps are not to be found any more: moved aside on disk (returns where to), deleted in memory."""
        gone = set(steps)
        if self._owns_memory:
            for step in gone.intersection(self._in_memory()):
                shutil.rmtree(step_folder(self.memory, step))
        return set_aside(self.root, gone.intersection(complete_steps(self.root))) if self._owns_root else None

    def remove_memory(self) -> None:
        if self._owns_memory and why_not_private(self.memory) is None:
            shutil.rmtree(self.memory, ignore_errors=True)

    def close(self, *, is_abandoned: bool = False) -> None:
        """`is_abandoned`: this worker leaves as after an error. The last one to do so removes what was being saved."""
        if is_abandoned:
            with suppress(CheckpointError, OSError):
                if not self._owns_root:
                    # Had by whoever owns the folder until it has left, and then by a new start of the run.
                    self._held.enter_context(RunLock(self.root, patience_s=ABANDONED_PATIENCE_S))
                clean_up(self.root)
        self._held.close()


def memory_folder(root: Path, identifier: str) -> Path:
    place = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
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


@contextmanager
def failing_together(communicator: Communicator) -> Iterator[None]:
    """Workers leave the block together; a `CheckpointError` or `OSError` of one of them is raised on every worker."""
    own: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        own = error
    except OSError as error:
        own = CheckpointError(str(error))
    told = gather("" if own is None else str(own), communicator)
    if own is not None:
        raise own
    for rank, text in enumerate(told):
        if text:
            raise CheckpointError(f"on rank {rank}: {text}")
