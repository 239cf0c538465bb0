"""All errors that Paceline raises. `PacelineError` is the base of all but `Stopped`, which is a SystemExit."""

from paceline.checkpoint.errors import CheckpointError
from paceline.core.errors import (
    CommunicationError,
    CommunicationTimeout,
    GradientError,
    MisuseError,
    NonFiniteError,
    PacelineError,
    WorkerError,
)
from paceline.run.saving.resuming import NoProgressError
from paceline.run.saving.stopping import Stopped

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "CommunicationTimeout",
    "GradientError",
    "MisuseError",
    "NoProgressError",
    "NonFiniteError",
    "PacelineError",
    "Stopped",
    "WorkerError",
]
