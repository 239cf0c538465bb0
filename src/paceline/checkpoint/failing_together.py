"""What every worker does on its own at the same point: an error on one is an error on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.checkpoint.errors import CheckpointError
from paceline.comm.base import Communicator
from paceline.comm.messages import gather


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
