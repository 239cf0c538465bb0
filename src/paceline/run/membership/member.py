"""A worker's view of the generations, which its agent publishes in a file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

from paceline.core.rank_variables import GENERATION_VARIABLE, MEMBER_VARIABLE, STORE_VARIABLE
from paceline.core.world import World
from paceline.run.membership.generation import Generation

POLL_S = 0.002


class Member:
    """This process as a member of its run."""

    def __init__(self, number: int, file: Path, store: str) -> None:
        self.number = number
        self._file = file
        self._store = store

    @classmethod
    def from_environment(cls) -> Member | None:
        """None if the workers of this run cannot change."""
        if GENERATION_VARIABLE not in os.environ:
            return None
        file = Path(os.environ[GENERATION_VARIABLE])
        return cls(int(os.environ[MEMBER_VARIABLE]), file, os.environ[STORE_VARIABLE])

    def newest(self) -> Generation:
        return Generation.from_json(self._file.read_text())

    def wait_for_newer(self, generation: Generation, limit_s: float) -> Generation | None:
        """The newest generation after this one, or None if none was published within `limit_s`."""
        deadline_s = monotonic() + limit_s
        while (newest := self.newest()).number == generation.number:
            if monotonic() > deadline_s:
                return None
            sleep(POLL_S)
        return newest

    def world(self, generation: Generation, before: World) -> World:
        """This member's world in a generation. Its device and host stay."""
        rank = generation.rank_of(self.number)
        if rank is None:
            raise ValueError(f"member {self.number} is not in generation {generation.number}")
        size = len(generation.members)
        return replace(before, rank=rank, size=size, local_rank=rank, local_size=size)

    def environment(self, generation: Generation) -> dict[str, str]:
        """The variables of this member's rank in a generation."""
        rank, size = generation.members.index(self.number), len(generation.members)
        values = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank}
        values |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size}
        return {name: str(value) for name, value in values.items()} | {STORE_VARIABLE: self.store_of(generation)}

    def store_of(self, generation: Generation) -> str:
        """The file through which the members of a generation find each other.

        Each generation has its own: a member that was killed may have left a half-written entry in the one before.
        """
        return f"{self._store}-{generation.number}" if generation.number else self._store
