"""Saving beside the training: the step waits for a copy of the state, the disk for nobody.

Lifecycle. `save` copies the state into host memory and returns; a thread writes, makes the checkpoint visible and
deletes what need not be kept. One save is under way at a time: the next one waits for it, or is skipped. A save that
failed is reported once: by `poll` or `settle`, for who wants to go on, or as an exception of the next `save`, `wait`
or `close`. Who leaves because of an error calls `abandon` before `close`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import complete_steps, delete, partial_folder, step_folder
from paceline.checkpoint.host_copy import HostCopy
from paceline.checkpoint.keep import Keep, Saved, to_delete
from paceline.checkpoint.pieces import Component, Disk, Piece, pieces_of
from paceline.checkpoint.reading import inspect
from paceline.checkpoint.saving import DEFAULT_TIMEOUT_S, Job, Manner, save_pieces
from paceline.core.world import World


class AsyncWriter:
    """Writes one worker's part of checkpoints into the run folder `root`. Every worker of the world has one."""

    def __init__(
        self,
        root: Path,
        world: World | None = None,
        *,
        disk: Disk = Disk.SHARED,
        num_shards: int = 1,
        keep: Keep | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        flush: bool = True,
    ) -> None:
        self._root = root
        self._manner = Manner(world or World(), disk, timeout_s, flush)
        self._num_shards = num_shards
        self._keep = keep or Keep()
        self._copy = HostCopy()
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="paceline-checkpoint")
        self._under_way: futures.Future[None] | None = None
        # Folders of saves that failed, into which another worker may still write.
        self._failed: list[Path] = []
        root.mkdir(parents=True, exist_ok=True)

    @property
    def is_busy(self) -> bool:
        """Whether a save is still being written."""
        return self._under_way is not None and not self._under_way.done()

    def prepare(self, components: Sequence[Component]) -> None:
        """Get the memory for saves of these components, behind the training. Without it the first save is slower."""
        self.wait()
        self._under_way = self._thread.submit(self._copy.reserve, _tensors_of(self._pieces(components)))

    def save(self, job: Job, *, skip_if_busy: bool = False) -> bool:
        """Copy the state and have it written. Returns when the state may change again.

        While an earlier save is being written this waits for it; with `skip_if_busy` it does nothing and returns
        False. Workers must skip together: let rank 0 decide by `is_busy`, and tell the others.
        """
        if skip_if_busy and self.is_busy:
            return False
        self.wait()
        pieces = self._pieces(job.components)
        tensors = _tensors_of(pieces)
        copies, wait_for_copies = self._copy.take(tensors)
        copy_of = {id(tensor): copy for tensor, copy in zip(tensors, copies, strict=True)}
        copied = [
            replace(
                piece, tensors={f: {n: copy_of[id(t)] for n, t in held.items()} for f, held in piece.tensors.items()}
            )
            for piece in pieces
        ]
        self._under_way = self._thread.submit(self._write, job, copied, wait_for_copies)
        return True

    def poll(self) -> CheckpointError | None:
        """Why the last save failed, once; None if it did not, or is still being written. Does not wait."""
        if self.is_busy:
            return None
        self._remove_failed()
        if self._under_way is None:
            return None
        ended, self._under_way = self._under_way, None
        error = ended.exception()
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        return error

    def settle(self) -> CheckpointError | None:
        """Wait until nothing is being written any more, and return why the last save failed, if nobody was told."""
        if self._under_way is not None:
            futures.wait([self._under_way])
        return self.poll()

    def wait(self) -> None:
        """Return when nothing is being written any more; raise if the last save failed and nobody was told."""
        if error := self.settle():
            raise error

    def abandon(self) -> None:
        """Wait for no other worker's part any more: it may be gone."""
        self._manner.give_up.set()

    def close(self) -> None:
        """Finish what is being written and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._remove_failed()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as not_saved:
            if error is None:
                raise
            error.add_note(str(not_saved))

    def _pieces(self, components: Sequence[Component]) -> list[Piece]:
        return pieces_of(components, self._manner.world, self._manner.disk, self._num_shards)

    def _write(self, job: Job, pieces: list[Piece], wait_for_copies: Callable[[], None]) -> None:
        wait_for_copies()
        try:
            folder = save_pieces(self._root, job, pieces, self._manner)
        except BaseException:
            if self._manner.is_first:
                # No worker is further behind than the save before this one.
                self._failed = [*self._failed[-1:], partial_folder(self._root, job.step, job.token)]
            raise
        if folder is not None:
            self._remove_failed()
            self._failed.clear()  # all workers have come to this save, and so left the earlier ones
            delete_unneeded(self._root, job.step, self._keep)

    def _remove_failed(self) -> None:
        for partial in self._failed:
            shutil.rmtree(partial, ignore_errors=True)


def delete_unneeded(root: Path, just_written: int, keep: Keep) -> list[int]:
    """Delete the checkpoints that `keep` does not claim, and return their steps."""
    if keep.keeps_all:
        return []
    unneeded = to_delete([_saved(root, step, keep) for step in complete_steps(root)], just_written, keep)
    for step in unneeded:
        try:
            delete(root, step)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {just_written} was saved, but {step_folder(root, step)}, which need not be "
                f"kept, could not be deleted: {error.strerror} ({error.filename})"
            ) from error
    return unneeded


def _saved(root: Path, step: int, keep: Keep) -> Saved:
    try:
        metrics = inspect(step_folder(root, step)).metrics
    except CheckpointError:
        return Saved(step, is_intact=False)
    return Saved(step, metrics.get(keep.metric) if keep.metric is not None else None)


def _tensors_of(pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Every tensor once, also one that has several names."""
    tensors = (tensor for piece in pieces for held in piece.tensors.values() for tensor in held.values())
    return list({id(tensor): tensor for tensor in tensors}.values())
