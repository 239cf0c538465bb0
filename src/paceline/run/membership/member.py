"""A worker's view of the generations, which its agent publishes in a file and on the board."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

from paceline.core.errors import CommunicationError
from paceline.core.processes import FIRST_SIZE_VARIABLE, MEMBER_VARIABLE, MEMBERSHIP_VARIABLE, NUMBER_VARIABLE
from paceline.core.timing import ActiveTimer
from paceline.run.membership.board import Board
from paceline.run.membership.generation import Generation, Member

if TYPE_CHECKING:  # both import torch, and launchers import this module
    from paceline.comm.rendezvous import RendezvousPoint
    from paceline.core.world import World

POLL_S = 0.002

BOARD_FILE = "board"
GENERATION_FILE = "generation"


def leave_file(folder: Path, member: Member) -> Path:
    """A file that a worker creates to request that the member leaves."""
    return folder / f"leave-{member.slot}-{member.start}"


def leave_key(member: Member) -> str:
    """The key of the same request to the agent of another node, in the agents' store."""
    return f"leave-{member}"


class Membership:
    """This process as a member of its run."""

    def __init__(self, member: Member, folder: Path) -> None:
        self.member = member
        self._folder = folder
        self.board = Board(folder / BOARD_FILE)
        self.row = self.board.row(member.slot)
        # See `core.processes`.
        self.number = int(os.environ.get(NUMBER_VARIABLE, member.slot))
        self.first_size = int(os.environ.get(FIRST_SIZE_VARIABLE, 1))

    @classmethod
    def from_environment(cls) -> Membership | None:
        """None if the workers of this run cannot change."""
        if MEMBERSHIP_VARIABLE not in os.environ:
            return None
        return cls(Member.parse(os.environ[MEMBER_VARIABLE]), Path(os.environ[MEMBERSHIP_VARIABLE]))

    def newest(self) -> Generation:
        return Generation.from_json((self._folder / GENERATION_FILE).read_bytes())

    def wait_for_newer(self, generation: Generation, limit_s: float) -> bool:
        """Whether another generation was announced within `limit_s`."""
        return _wait_until(lambda: self.board.newest != generation.number, limit_s)

    def wait_for_loss(self, generation: Generation, limit_s: float) -> bool:
        """Whether the loss of a member of the generation was announced within `limit_s`."""
        return _wait_until(lambda: self.is_broken(generation), limit_s)

    def ask_to_leave(self, member: Member) -> None:
        """Request that a member leaves the run after a step."""
        if member.node == self.member.node:
            leave_file(self._folder, member).touch()
        else:
            from paceline.comm.rendezvous import nodes_store

            nodes_store().set(leave_key(member), "1")

    def is_broken(self, generation: Generation) -> bool:
        """Whether a member of the generation was lost."""
        return generation.number < self.board.intact

    def world(self, generation: Generation, before: World) -> World:
        """This member's world in a generation, with the same device and host."""
        rank = generation.rank_of(self.member)
        assert rank is not None, f"{self.member} is not in generation {generation.number}"
        local_rank, local_size = generation.local_ranks(self.member)
        size = len(generation.members)
        return replace(before, rank=rank, size=size, local_rank=local_rank, local_size=local_size, is_joining=False)

    def note_rank(self, world: World) -> None:
        """Set the environment variables of this member's rank, for connections opened later in this process."""
        values = {"RANK": world.rank, "LOCAL_RANK": world.local_rank, "ROLE_RANK": world.rank}
        values |= {"WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.local_size, "ROLE_WORLD_SIZE": world.size}
        os.environ.update({name: str(value) for name, value in values.items()})

    def rendezvous_point(self, generation: Generation) -> RendezvousPoint:
        """Where the members of a generation connect."""
        from paceline.comm.rendezvous import RendezvousPoint, generation_store

        def check() -> None:
            if self.board.newest != generation.number:
                raise CommunicationError(f"generation {generation.number} ended while its members connected")

        return RendezvousPoint(generation_store(generation.number), check)


def _wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    waited = ActiveTimer()
    while not condition():
        if waited.update() > limit_s:
            return False
        sleep(POLL_S)
    return True
