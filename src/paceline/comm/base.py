"""The communicator: how tensors move between the workers of a world.

Lifecycle
    A communicator is complete when constructed and serves one world until `close()`. A changed world needs a new
    communicator, made from a new rendezvous; several may be open at the same time.

Calls
    Every worker of the world makes the same calls in the same order; calls are matched by that order. A call starts an
    exchange and returns a `Pending`. The tensor must not be used until `Pending.wait()` has returned. Waits may happen
    in any order.

Failures
    An exchange never hangs. If a peer does not take part within `timeout_s`, `wait()` raises `CommunicationTimeout`. If
    a peer has died, failed or closed, it raises `CommunicationError`. After an error the content of the tensors is
    undefined and the communicator accepts no further exchange, only `close()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.core.timing import DEFAULT_TIMEOUT_S as DEFAULT_TIMEOUT_S
from paceline.core.world import World


class Pending(Protocol):
    """An exchange in progress."""

    def wait(self) -> None:
        """Return when the result is in the tensor; raise if the exchange failed or timed out."""


@dataclass(frozen=True)
class Ownership:
    """Several buffers, each of which one worker owns.

    numels: elements, by buffer, at least 1. holders: the ranks that get the sum of a buffer, the owner first.
    num_slots: on each worker, the buffers that it does not own use this many slots of memory in turn: an exchange must
    be complete before its slot is used again.
    """

    numels: Sequence[int]
    holders: Sequence[Sequence[int]]
    dtype: torch.dtype
    device: torch.device
    num_slots: int


class OwnedBuffer(Protocol):
    """A buffer whose sum over all workers is kept by one of them, its owner. See `Communicator.owned`."""

    @property
    def tensor(self) -> torch.Tensor:
        """On the owner: its memory. On the others: their contribution."""

    @property
    def total(self) -> torch.Tensor | None:
        """On holders: the memory of the sum after `reduce`; on the owner the same as `tensor`."""

    def reduce(self) -> Pending:
        """Add the other workers' tensors to the owner's. Their content is undefined afterwards."""

    def deliver(self, dtype: torch.dtype, receive: Callable[[torch.Tensor], object]) -> Pending:
        """Call `receive` with the owner's memory on every other worker, inside `wait`.

        Its argument has `dtype` and the buffer's number of elements. It may be the owner's memory itself and is valid
        during the call only. A worker must wait for the deliveries that it receives in the order of the calls.
        """


class Communicator(Protocol):
    """One worker's endpoint."""

    @property
    def world(self) -> World: ...

    @property
    def timeout_s(self) -> float: ...

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Replace `tensor`, on every worker, by the sum over all workers."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        """Replace `tensor`, on every worker, by the tensor of rank `source`."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialized flat buffer for repeated exchanges. All workers make the same calls of `empty`.

        A communicator may place the buffer in memory where exchanges are fastest, such as shared memory.
        """

    def owned(self, ownership: Ownership) -> list[OwnedBuffer]:
        """Buffers of zeros. All workers make the same calls of `owned`."""

    def abort(self) -> None:
        """Fail the exchanges in progress and all later ones with `CommunicationError`. Called from any thread.

        Peers that wait for this worker fail too. Used when an exchange may not notice the loss of a peer.
        """

    def close(self) -> None:
        """Release all resources. Later exchanges raise `MisuseError`; closing again is a no-op."""


class Link(Protocol):
    """Blocking transfers between rank 0 and each other worker, for workers that share a reader."""

    @property
    def world(self) -> World: ...

    @property
    def is_trusted(self) -> bool:
        """Whether messages are known to come from this user's own processes."""

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a CPU tensor to rank `to`, which must receive it; returns when the tensor may be changed."""

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive the next tensor from rank `source` into `tensor`, which has the same size and dtype."""

    def abort(self) -> None:
        """Fail the transfer in progress and all later ones, on both sides. Called from another thread."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Settled:
    """A `Pending` that is already complete, or could not be started."""

    error: BaseException | None = None

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


DONE = Settled()
