"""The communicator: how tensors move between the workers of a world.

Lifecycle. A communicator is complete when constructed and serves one world until `close()`. Every worker of
the world makes the same calls in the same order; that order, not a name, pairs them up. A call starts the
exchange and returns a `Pending`; the tensor must not be touched until its `wait()` has returned. A call whose
peers do not show up within `timeout_s` raises `CommunicationTimeout`, one whose peer is gone
`CommunicationError`: never a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch

from paceline.core.world import World

DEFAULT_TIMEOUT_S = 600.0

# What the workers' numbers, by rank, come to: element by element, into `out`, which may be those of rank 0.
Combination: TypeAlias = Callable[[Sequence[torch.Tensor], torch.Tensor], None]


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Return when the result is in the tensor; raise if the exchange failed or timed out."""


class Communicator(Protocol):
    """One worker's end of the exchange."""

    @property
    def world(self) -> World: ...

    @property
    def timeout_s(self) -> float: ...

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Replace `tensor`, on every worker, by the sum over all workers."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        """Replace `tensor`, on every worker, by the one of rank `source`."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a flat buffer that this communicator will reduce often.

        A communicator may place it where it reduces fastest (memory shared by the workers of a host).
        """

    def close(self) -> None:
        """Release what the communicator holds. Further calls are errors."""


class PointToPoint(Protocol):
    """A communicator that also reaches single workers, one call after the other."""

    @property
    def world(self) -> World: ...

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Hand a tensor on the host to one worker, which receives it; returns when it has left."""

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Wait for what `source` sends, into `tensor`, which has its size and type."""


class Link(PointToPoint, Protocol):
    """What workers that read together talk over, beside the step's exchange: each of them with rank 0."""

    @property
    def is_trusted(self) -> bool:
        """Whether it is certain that messages come from a worker of this run, as this user started it."""

    def abort(self) -> None:
        """Let a message that is under way fail, here and there, and those to come. Called by another thread."""

    def close(self) -> None: ...


class Done:
    """A `Pending` that is complete: nothing was exchanged, or it already happened."""

    def wait(self) -> None:
        return


DONE = Done()
