"""The exceptions users see.

Bad arguments raise `ValueError` or `TypeError`; what goes wrong while a run is under way raises one of these. They
travel between processes: every argument but the message has a default, and what was given is restored by pickle.
"""

from __future__ import annotations


class PacelineError(RuntimeError):
    """Base of every error that Paceline raises about a run."""


class CommunicationError(PacelineError):
    """An exchange between workers failed: a peer is gone or the link broke."""


class CommunicationTimeout(CommunicationError):
    """A worker did not reach an exchange within the time-out."""


class NonFiniteError(PacelineError):
    """A loss or a gradient became inf or NaN outside of fp16 loss scaling.

    `step` counts from 1; `micro_batch` and `rank` tell who computed it, None if that is not known.
    """

    def __init__(self, message: str, *, step: int = 0, micro_batch: int | None = None, rank: int | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.micro_batch = micro_batch
        self.rank = rank


class GradientError(PacelineError):
    """A gradient that the exchange cannot take: sparse, too late, or of a parameter it does not know."""


class MisuseError(PacelineError):
    """The library was called in an order that cannot work on several workers."""


class WorkerError(PacelineError):
    """A worker ended with an error. Raised in the process that launched it.

    `rank` is the worker that failed first, `traceback_text` what it printed (empty if it was killed).
    """

    def __init__(self, message: str, *, rank: int = 0, traceback_text: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback_text = traceback_text
