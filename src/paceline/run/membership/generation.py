"""A generation: the members of a run between two changes. Arithmetic only; imports no torch, for launchers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Generation:
    """A numbered list of members, in the order of their ranks.

    A member is a worker process. Its number is never used again: the first ones are numbered by their ranks. `left`:
    why members of the generation before are not in this one.
    """

    number: int
    members: tuple[int, ...]
    left: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def first(cls, num_members: int) -> Generation:
        return cls(0, tuple(range(num_members)))

    def without(self, left: Mapping[int, str]) -> Generation:
        """The next generation. Those who stay keep their order."""
        members = tuple(member for member in self.members if member not in left)
        return Generation(self.number + 1, members, {m: why for m, why in left.items() if m in self.members})

    def rank_of(self, member: int) -> int | None:
        return self.members.index(member) if member in self.members else None

    def previous_ranks(self, before: Generation) -> tuple[int | None, ...]:
        """By rank: the member's rank in an earlier generation; None for one that was not in it."""
        return tuple(before.rank_of(member) for member in self.members)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Generation:
        values: dict[str, Any] = json.loads(text)
        members: Sequence[int] = values["members"]
        return cls(values["number"], tuple(members), {int(m): why for m, why in values["left"].items()})
