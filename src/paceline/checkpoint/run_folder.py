"""A run's folders: the one on disk that the user chose, and one in /dev/shm for snapshots, both locked for one run.

The folder in /dev/shm outlives the workers, but not the machine. Its name contains a hash of the run folder's path and
an identifier stored in the run folder: a new run at the same path does not find the snapshots of a deleted one. Other
users can compute the name and create the folder first, so it is used only if it belongs to this user and is closed to
others.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from io import FileIO
from pathlib import Path
from time import monotonic, sleep

from paceline.checkpoint.errors import CheckpointError, LockedError, cause_of
from paceline.checkpoint.files import replacing, write_file
from paceline.checkpoint.folders import clean_up, complete_steps, delete, move_aside, step_folder, step_of
from paceline.comm.base import Communicator
from paceline.comm.messages import decided_by_rank_0, gather, wait_for_all
from paceline.core.notice import notice
from paceline.core.private_folder import private_folder, why_not_private
from paceline.core.world import World

logger = logging.getLogger("paceline")

MEMORY = Path("/dev/shm")
IDENTIFIER_NAME = ".run-id"
LOCK_NAME = ".lock"
# How long to wait for the lock of a run that was just killed.
LOCK_TIMEOUT_S = 10.0
# The same if its host may be lost: a network file system keeps the locks of a host that is down for a minute or two.
LOST_LOCK_TIMEOUT_S = 180.0
# How long a worker that leaves after an error waits for the lock, to clean up: the owner may be leaving too.
ABANDONED_LOCK_TIMEOUT_S = 0.5
_POLL_S = 0.1

_IDENTIFIER = re.compile(r"[0-9a-f]{16}")

_locked: set[FileIO] = set()


@contextmanager
def run_lock(folder: Path, *, timeout_s: float = 0.0, lost_host_timeout_s: float = 0.0) -> Iterator[None]:
    """Hold the lock on `folder`. Raises `LockedError` if another process holds it after `timeout_s`.

    lost_host_timeout_s: the same for a process of another host, if that is longer. The host may be down.

    The kernel releases the lock when the process ends, so a crash leaves no stale lock. Between machines it works where
    the shared file system forwards `flock`, as NFS (version 4, or 3 with its lock service) and Lustre mounted with
    `flock` do. With `localflock`, and on some FUSE file systems, it only excludes processes of the same machine. Where
    there are no locks at all, as on Lustre by default, a warning says so.
    """
    begun_s, limit_s = monotonic(), timeout_s
    with FileIO(os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+") as file:
        while not _try_to_lock(file, folder):
            file.seek(0)
            holder = file.read(1000).decode(errors="replace").strip() or "another process"
            if f" on {socket.gethostname()} " not in holder and limit_s < lost_host_timeout_s:
                limit_s = lost_host_timeout_s
                notice(f"{folder} is in use by {holder}: waiting up to {limit_s:g} s, in case that host is down")
            if monotonic() >= begun_s + limit_s:
                raise LockedError(
                    f"{folder} is in use by {holder}: wait until that run has ended, stop it, or choose another folder"
                )
            sleep(_POLL_S)
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
        _locked.add(file)
        try:
            yield
        finally:
            _locked.discard(file)


def _try_to_lock(file: FileIO, folder: Path) -> bool:
    """False if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        logger.warning("the file system of %s has no locks: start no second run in this folder", folder)
    return True


def _release_in_child() -> None:
    """A forked data-loading process must not keep the lock when its parent is gone."""
    for file in _locked:
        file.close()
    _locked.clear()


os.register_at_fork(after_in_child=_release_in_child)


def writer_ranks(world: World, *, shared_disk: bool) -> range:
    """The ranks that write into this worker's run folder. The first of them publishes checkpoints."""
    if shared_disk:
        return range(world.size)
    first = world.rank - world.local_rank
    return range(first, first + world.local_size)


class RunFolder:
    """The folders, locked until `close`. Every worker creates one, at the same point.

    `shared_disk`: all workers see the same folder; otherwise each node has one. `with_memory`: the run takes snapshots,
    so snapshots of an earlier start count; otherwise they are removed. A worker that joins a run later calls
    `reconnect` before anything else.
    """

    def __init__(
        self, root: Path, communicator: Communicator, *, shared_disk: bool = True, with_memory: bool = False
    ) -> None:
        self.root = root
        self._communicator = communicator
        self._shared_disk = shared_disk
        self._has_memory = with_memory
        self._locks = ExitStack()
        self._is_locked = self._owns_root = self._owns_memory = False
        self.memory = Path()
        if communicator.world.is_joining:
            return
        self._assign_roles()
        with ExitStack() as undo:
            undo.callback(self.close)
            self._open(LOCK_TIMEOUT_S)
            with raising_on_all_workers(communicator):
                if self._owns_memory:
                    self._clean_memory()
            undo.pop_all()

    def _assign_roles(self) -> None:
        world = self._communicator.world
        self._owns_root = world.rank == writer_ranks(world, shared_disk=self._shared_disk)[0]
        self._owns_memory = world.local_rank == 0

    def reconnect(self) -> None:
        """The communicator has other workers now, none of which is writing. The lock of a lost owner is free."""
        self._assign_roles()
        if not self._owns_root:
            self._release()
        wait_for_all(self._communicator)
        self._open(LOST_LOCK_TIMEOUT_S)

    def _open(self, lock_timeout_s: float) -> None:
        """The owner locks the folder and cleans it up; all workers learn the name of the folder for snapshots."""
        identifier = ""
        with raising_on_all_workers(self._communicator):
            try:
                if self._owns_root:
                    if not self._is_locked:  # else it existed: if it has vanished, its disk may not be mounted
                        self.root.mkdir(parents=True, exist_ok=True)
                    self._lock(lock_timeout_s, LOST_LOCK_TIMEOUT_S)
                    clean_up(self.root)
                    identifier = _identifier(self.root)
            except OSError as error:
                raise CheckpointError(
                    f"checkpoints cannot be saved in {self.root}: {cause_of(error)}; choose a folder that this user "
                    "can write to"
                ) from error
        self.memory = memory_folder(self.root, decided_by_rank_0(lambda: identifier, self._communicator))

    def _lock(self, timeout_s: float, lost_host_timeout_s: float) -> None:
        if not self._is_locked:
            lock = run_lock(self.root, timeout_s=timeout_s, lost_host_timeout_s=lost_host_timeout_s)
            self._locks.enter_context(lock)
            self._is_locked = True

    def _release(self) -> None:
        self._locks.close()
        self._is_locked = False

    def _clean_memory(self) -> None:
        """Remove stale snapshots, and check the folder of the others. Folders of other users are not touched."""
        prefix = self.memory.name.rpartition("-")[0]
        for folder in MEMORY.glob(f"{prefix}-*"):
            is_used = folder == self.memory and self._has_memory
            if reason := why_not_private(folder):
                if is_used:
                    raise CheckpointError(
                        f"{folder} is not a private folder of this user: {reason}; remove it, or keep no snapshots in "
                        "memory (snapshot_every=None)"
                    )
                logger.warning("%s is not used: %s", folder, reason)
            elif is_used:
                clean_up(folder)
            else:
                if folder == self.memory and complete_steps(folder):
                    logger.warning("the snapshots in %s are removed: snapshot_every=None", folder)
                shutil.rmtree(folder, ignore_errors=True)

    def make_memory(self) -> None:
        """Create the folder for snapshots. Called by every worker; returns when it exists."""
        with raising_on_all_workers(self._communicator):
            try:
                if self._owns_memory:
                    private_folder(self.memory)
            except OSError as error:
                raise CheckpointError(
                    f"snapshots cannot be kept in {MEMORY}: {cause_of(error)}; set snapshot_every=None"
                ) from error

    def found(self) -> list[Path]:
        """The checkpoints and snapshots that this worker sees."""
        is_private = self._has_memory and why_not_private(self.memory) is None
        roots = [self.root, self.memory] if is_private else [self.root]
        return [step_folder(root, step) for root in roots for step in complete_steps(root)]

    def discard(self, unwanted: Iterable[Path]) -> Path | None:
        """Delete these snapshots, and move these checkpoints on disk aside; returns where to."""
        # The highest step first, so an interruption leaves the lower ones visible.
        ordered = sorted(unwanted, key=lambda path: step_of(path) or 0, reverse=True)
        for path in ordered if self._owns_memory else ():
            if path.parent == self.memory:
                delete(path)
        on_disk = [path for path in ordered if path.parent == self.root] if self._owns_root else []
        return move_aside(self.root, on_disk) if on_disk else None

    def remove_memory(self) -> None:
        if self._owns_memory and why_not_private(self.memory) is None:
            shutil.rmtree(self.memory, ignore_errors=True)

    def close(self, *, is_abandoned: bool = False) -> None:
        """Release the lock. `is_abandoned`: after an error; the last worker to leave removes unfinished saves."""
        if is_abandoned:
            with suppress(CheckpointError, OSError):
                # Held by the folder's owner until it has left, and by a new start of the run afterwards.
                self._lock(ABANDONED_LOCK_TIMEOUT_S, ABANDONED_LOCK_TIMEOUT_S)
                clean_up(self.root)
        self._release()


def memory_folder(root: Path, identifier: str) -> Path:
    path_hash = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return MEMORY / f"paceline-{path_hash}-{identifier}"


def _identifier(root: Path) -> str:
    """Distinguishes this run from others at the same path. Created once and kept when the run is resumed."""
    path = root / IDENTIFIER_NAME
    if path.is_file() and _IDENTIFIER.fullmatch(found := path.read_text(errors="replace").strip()):
        return found
    created = secrets.token_hex(8)
    with replacing(path) as unfinished:
        write_file(unfinished, [f"{created}\n".encode()])
    return created


@contextmanager
def raising_on_all_workers(communicator: Communicator) -> Iterator[None]:
    """All workers leave the block together. A `CheckpointError` or `OSError` of one of them is raised on all."""
    own: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        own = error
    except OSError as error:
        own = CheckpointError(str(error))
    messages = gather("" if own is None else str(own), communicator)
    if own is not None:
        raise own
    for rank, message in enumerate(messages):
        if message:
            raise CheckpointError(f"on rank {rank}: {message}")
