"""The exceptions of saving and reading checkpoints."""

from __future__ import annotations

from paceline.core.errors import PacelineError


class CheckpointError(PacelineError):
    """A checkpoint could not be written, or one that was read is damaged, incomplete or not ours."""


class LockedError(CheckpointError):
    """Another process writes into the run folder."""


class ReplicationError(CheckpointError):
    """State that must be the same on every worker is not. `ranks` are those that differ from rank 0."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
