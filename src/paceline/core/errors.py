"""The exceptions users see.

Invalid arguments raise `ValueError` or `TypeError`; failures of a run raise one of these. They are pickled between
processes, so every argument except the message has a default.
"""

from __future__ import annotations


class PacelineError(RuntimeError):
    """Base class of all errors about a run."""


class CommunicationError(PacelineError):
    """An exchange between workers failed: a peer was lost or a connection broke."""


class CommunicationTimeout(CommunicationError):
    """A worker did not take part in an exchange within the timeout."""


class NonFiniteError(PacelineError):
    """A loss or a gradient became inf or NaN outside of fp16 loss scaling.

    `step` counts from 1; `micro_batch` and `rank` say where it was computed, or are None if that is unknown.
    """

    def __init__(self, message: str, *, step: int = 0, micro_batch: int | None = None, rank: int | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.micro_batch = micro_batch
        self.rank = rank


class GradientError(PacelineError):
    """A gradient that cannot be exchanged: sparse, too late, or of an unknown parameter."""


class MisuseError(PacelineError):
    """A call, or an order of calls, that cannot lead to the right result on any number of workers."""


class WorkerError(PacelineError):
    """A worker ended with an error. Raised in the process that launched it.

    `rank` is the worker that failed first, `traceback_text` its traceback (empty if it was killed).
    """

    def __init__(self, message: str, *, rank: int = 0, traceback_text: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback_text = traceback_text


class GenerationEnded(BaseException):
    """A worker was lost and the others continue without it: the step is abandoned and repeated.

    Never reaches the user. Not an `Exception`, so that code of the user between two parts of the engine, such as a
    hook, does not catch it.
    """
