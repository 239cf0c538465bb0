"""The exceptions of writing and reading checkpoints."""

from __future__ import annotations

from paceline.core.errors import PacelineError


class CheckpointError(PacelineError):
    """A checkpoint could not be written, or is damaged, incomplete or of another run."""


class LockedError(CheckpointError):
    """Another process holds the lock of the run folder."""


class ReplicationError(CheckpointError):
    """State that must be equal on all workers is not. `ranks` are those that differ from rank 0."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
