"""The communicator of a run whose workers may change: it reconnects for each generation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from paceline.comm import connect
from paceline.comm.base import Communicator, OwnedBuffer, Ownership, Pending
from paceline.comm.single import SingleCommunicator
from paceline.core.errors import CommunicationError, CommunicationTimeout, GenerationEnded
from paceline.core.world import World
from paceline.run.membership.board import Activity
from paceline.run.membership.generation import Generation
from paceline.run.membership.member import Membership

if TYPE_CHECKING:
    from paceline.comm.rendezvous import RendezvousPoint

# How long to wait for the announcement of the next generation after an exchange has failed. The agents notice a lost
# worker within milliseconds and a lost node within a second or two. Without an announcement the failure was not a loss,
# or too few members are left.
NEWS_WAIT_S = 6.0
# How often a thread checks whether the exchange in progress must be aborted. Shared memory notices a loss earlier.
WATCH_S = 0.1
WATCHER_NAME = "paceline membership"


class LeftRun(SystemExit):
    """This worker was asked to leave the run, or the others have lost contact with it. They continue without it."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(0)
        self.reason = reason


class ElasticCommunicator:
    """Exchanges between the members of the newest generation.

    When a member is lost, exchanges raise `GenerationEnded` on all others, once `can_recover` is set. They then call
    `rejoin` together. Memory of `empty` belongs to the generation in which it was allocated. A worker that joins later
    is a world of one until its first `rejoin`.
    """

    def __init__(self, membership: Membership, world: World, backend: str | None, timeout_s: float) -> None:
        self.membership = membership
        self.timeout_s = timeout_s
        self._backend = backend
        self.can_recover = False
        self.generation = membership.newest()
        self.is_joining = membership.member not in self.generation.members
        self._inner: Communicator
        if self.is_joining:
            self.world = World(host=world.host, device=world.device, is_joining=True)
            self._inner = SingleCommunicator(self.world, timeout_s)
        else:
            self.world = membership.world(self.generation, world)
            self._inner = connect(self.world, backend, timeout_s, membership.rendezvous_point(self.generation))
        self._links: list[Callable[[], None]] = []  # abort functions of other connections
        self._lock = threading.Lock()  # of the above: the watcher must abort only the generation that has ended
        self._is_closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name=WATCHER_NAME, daemon=True)
        self._watcher.start()

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self.interruptible(self._inner.all_reduce, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        return self.interruptible(self._inner.broadcast, tensor, source)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        try:
            return self._inner.empty(numel, dtype, device)
        except CommunicationError as error:
            self.interrupt(error)

    def owned(self, ownership: Ownership) -> list[OwnedBuffer]:
        try:
            buffers = self._inner.owned(ownership)
        except CommunicationError as error:
            self.interrupt(error)
        return [_InterruptibleBuffer(buffer, self) for buffer in buffers]

    def interruptible(self, exchange: Callable[..., Pending], *args: Any) -> Pending:
        """Start an exchange. If it fails because a member was lost, raise `GenerationEnded`."""
        try:
            return _Interruptible(exchange(*args), self)
        except CommunicationError as error:
            self.interrupt(error)

    def interrupt(self, error: CommunicationError) -> NoReturn:
        """Raise `GenerationEnded` if the exchange failed because a member was lost and the run continues."""
        if isinstance(error, CommunicationTimeout) or not self.can_recover:
            raise error
        if not self.membership.wait_for_loss(self.generation, NEWS_WAIT_S):
            raise error
        raise GenerationEnded(str(error)) from error

    def complete(self) -> None:
        """With NCCL, `wait` returns before the exchange is done and an aborted one raises nothing: check it here."""
        if getattr(self._inner, "backend", None) == "nccl":
            torch.cuda.current_stream(self.world.device).synchronize()
            if self.membership.is_broken(self.generation):
                raise CommunicationError("a worker was lost during the exchange")

    def rejoin(self) -> Generation:
        """Connect the newest generation that includes this worker; returns it. All its members call this together."""
        membership = self.membership
        while True:
            generation, member = membership.newest(), membership.member
            if generation.number > self.generation.number:
                # Also if it has taken over the state before: the others may have gone on without it.
                self.is_joining |= member in generation.joined | generation.postponed
            if member not in generation.members:
                self._wait_to_join(generation)
                continue
            world = membership.world(generation, self.world)
            try:
                inner = connect(world, self._backend, self.timeout_s, membership.rendezvous_point(generation))
                break
            except CommunicationError:
                if not membership.wait_for_newer(generation, NEWS_WAIT_S):
                    raise
        # The new connection exists before the old one is closed.
        with self._lock:
            before, self._inner = self._inner, inner
            self.world, self.generation = world, generation
            self._links.clear()
        before.close()
        membership.note_rank(world)
        return generation

    def _wait_to_join(self, generation: Generation) -> None:
        if not self.is_joining:
            reason = generation.left.get(self.membership.member, "the others have lost contact with this worker")
            raise LeftRun(reason)
        row = self.membership.row
        row.note_outside()
        row.enter(Activity.READY)
        self.membership.wait_for_newer(generation, float("inf"))
        row.enter(Activity.WAITING)  # not READY: if the join is interrupted, it first has to read that it was

    def rendezvous_point(self) -> RendezvousPoint:
        """Through which the members of the current generation open further connections."""
        return self.membership.rendezvous_point(self.generation)

    def abort_with(self, abort_link: Callable[[], None]) -> None:
        """Call `abort_link` in another thread if the current generation ends by a loss."""
        self._links.append(abort_link)

    def abort(self) -> None:
        for abort_link in [*self._links]:
            abort_link()
        self._inner.abort()

    def close(self) -> None:
        self._is_closed.set()
        self.can_recover = False
        self._watcher.join()
        self._inner.close()

    def _watch(self) -> None:
        """Abort exchanges that wait for a lost member: not every transport detects a loss."""
        aborted = -1
        while not self._is_closed.wait(WATCH_S):
            with self._lock:
                if self.membership.is_broken(self.generation) and aborted < self.generation.number:
                    aborted = self.generation.number
                    with suppress(RuntimeError, OSError):  # closed meanwhile
                        self.abort()


class _Interruptible:
    __slots__ = ("_communicator", "_pending")

    def __init__(self, pending: Pending, communicator: ElasticCommunicator) -> None:
        self._pending = pending
        self._communicator = communicator

    def wait(self) -> None:
        communicator = self._communicator
        row = communicator.membership.row
        row.enter(Activity.WAITING)
        try:
            self._pending.wait()
            communicator.complete()
        except CommunicationError as error:
            communicator.interrupt(error)
        row.enter(Activity.ELSEWHERE)  # what follows has no time limit: it may wait for data, or for a disk


class _InterruptibleBuffer:
    def __init__(self, buffer: OwnedBuffer, communicator: ElasticCommunicator) -> None:
        self._buffer = buffer
        self._communicator = communicator
        self.tensor, self.total = buffer.tensor, buffer.total

    def reduce(self) -> Pending:
        return self._communicator.interruptible(self._buffer.reduce)

    def deliver(self, dtype: torch.dtype, receive: Callable[[torch.Tensor], object]) -> Pending:
        return self._communicator.interruptible(self._buffer.deliver, dtype, receive)
