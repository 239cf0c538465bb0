"""The exceptions of writing and reading checkpoints."""

from __future__ import annotations

from paceline.core.errors import PacelineError


class CheckpointError(PacelineError):
    """A checkpoint could not be written, or is damaged, incomplete or of another run."""


def cause_of(error: BaseException) -> str:
    """What went wrong, and with which file if the system says so."""
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.strerror} ({error.filename})" if error.filename else f"{error.strerror or error}"


class LockedError(CheckpointError):
    """Another process holds the lock of the run folder."""


class ReplicationError(CheckpointError):
    """State that must be equal on all workers is not. `ranks` are those that differ from rank 0."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
