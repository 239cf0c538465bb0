"""The communicator of a run whose workers may change: it is connected again for each generation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

import torch

from paceline.comm import connect
from paceline.comm.base import Communicator, Pending
from paceline.core.errors import CommunicationError, CommunicationTimeout, GenerationEnded
from paceline.core.world import World
from paceline.run.membership.generation import Generation
from paceline.run.membership.member import Member

if TYPE_CHECKING:
    from paceline.comm.rendezvous import MeetingPoint

# A member that lost another one learns within milliseconds from its agent that the run goes on. Without such news the
# failure was not a death, or not enough members are left.
NEWS_WAIT_S = 3.0


class ElasticCommunicator:
    """Exchanges between the members of the newest generation.

    When a member is lost, exchanges raise `GenerationEnded` on all others. They then call `rejoin` together; memory of
    `empty` belongs to the generation in which it was allocated.
    """

    def __init__(self, member: Member, world: World, backend: str | None, timeout_s: float) -> None:
        self.member = member
        self.timeout_s = timeout_s
        self._backend = backend
        self.world = world
        self.generation = member.newest()
        self.is_interruptible = False  # whether the caller can begin again what it does
        self._inner: Communicator = connect(world, backend, timeout_s)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        try:
            return _Interruptible(self._inner.all_reduce(tensor), self)
        except CommunicationError as error:
            self.interrupt(error)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        try:
            return _Interruptible(self._inner.broadcast(tensor, source), self)
        except CommunicationError as error:
            self.interrupt(error)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        try:
            return self._inner.empty(numel, dtype, device)
        except CommunicationError as error:
            self.interrupt(error)

    def interrupt(self, error: CommunicationError) -> NoReturn:
        """Raise `GenerationEnded` if the exchange failed because a member was lost and the run goes on."""
        if isinstance(error, CommunicationTimeout) or not self.is_interruptible:
            raise error
        if self.member.wait_for_newer(self.generation, NEWS_WAIT_S) is None:
            raise error
        raise GenerationEnded(str(error)) from error

    def rejoin(self) -> Generation:
        """Connect the newest generation; returns it. All its members call this together."""
        while True:
            generation = self.member.newest()
            world = self.member.world(generation, self.world)
            try:
                inner = connect(world, self._backend, self.timeout_s, self._meeting_point_of(generation))
                break
            except CommunicationError:
                if self.member.wait_for_newer(generation, NEWS_WAIT_S) is None:
                    raise
        # The new connection stands before the old one is destroyed.
        self._inner.close()
        self._inner, self.world, self.generation = inner, world, generation
        os.environ.update(self.member.environment(generation))  # for what is opened later in this process
        return generation

    def close(self) -> None:
        self._inner.close()

    @property
    def meeting_point(self) -> MeetingPoint | None:
        """Where the members of the current generation open further connections."""
        return self._meeting_point_of(self.generation) if self.generation.number else None

    def _meeting_point_of(self, generation: Generation) -> MeetingPoint:
        # Imported here: a world of one needs no torch.distributed.
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        from paceline.comm.rendezvous import MeetingPoint

        def check() -> None:
            if self.member.newest().number != generation.number:
                raise CommunicationError(f"generation {generation.number} ended while its members connected")

        return MeetingPoint(FileStore(self.member.store_of(generation), -1), check)


class _Interruptible:
    __slots__ = ("_communicator", "_pending")

    def __init__(self, pending: Pending, communicator: ElasticCommunicator) -> None:
        self._pending = pending
        self._communicator = communicator

    def wait(self) -> None:
        try:
            self._pending.wait()
        except CommunicationError as error:
            self._communicator.interrupt(error)
