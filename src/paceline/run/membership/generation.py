"""A generation: the members of a run between two changes. Arithmetic only; imports no torch, for launchers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


class Member(NamedTuple):
    """A worker process: the `start`-th one in a slot of a node. A replacement of a dead worker gets its slot."""

    node: int
    slot: int
    start: int = 0

    def __str__(self) -> str:
        return ":".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Member:
        return cls(*map(int, text.split(":")))


@dataclass(frozen=True)
class Generation:
    """A numbered list of members, in the order of their ranks. The workers of a node have consecutive ranks.

    `joined`: members that were not in the previous generation; they take over its state. `left`: members of the
    previous generation that are not in this one, with reasons. `postponed`: members of earlier generations that were
    still joining when another one was lost, until they join again: a worker may read only the newest generation.
    `is_urgent`: a member was lost, so the previous generation cannot complete its step; otherwise its members enter
    this one after a step.
    """

    number: int
    members: tuple[Member, ...]
    joined: frozenset[Member] = frozenset()
    left: Mapping[Member, str] = field(default_factory=dict)
    postponed: frozenset[Member] = frozenset()
    is_urgent: bool = False

    @classmethod
    def first(cls, workers_of_nodes: Mapping[int, int]) -> Generation:
        """All workers of a start. workers_of_nodes: the number of workers, by node."""
        return cls(0, tuple(Member(node, slot) for node, count in workers_of_nodes.items() for slot in range(count)))

    def without(self, lost: Mapping[Member, str], postponed: Iterable[Member] = ()) -> Generation:
        """The next generation after a loss. The remaining members keep their order."""
        removed = {*lost, *postponed}
        members = tuple(member for member in self.members if member not in removed)
        left = {member: why for member, why in lost.items() if member in self.members}
        still_joining = self.postponed.union(postponed) - {*lost}
        return Generation(self.number + 1, members, left=left, postponed=still_joining, is_urgent=True)

    def changed(self, leaving: Mapping[Member, str], joining: Iterable[Member]) -> Generation | None:
        """The next generation, which this one's members enter after a step; None if nothing changes.

        Newcomers follow the other workers of their node, or come last, so that rank 0 always has the run's state.
        """
        left = {member: why for member, why in leaving.items() if member in self.members}
        members = [member for member in self.members if member not in left]
        joined = [member for member in sorted(joining) if member not in self.members]
        for member in joined:
            own_node = [place for place, other in enumerate(members) if other.node == member.node]
            members.insert(own_node[-1] + 1 if own_node else len(members), member)
        if not left and not joined:
            return None
        return Generation(self.number + 1, tuple(members), frozenset(joined), left, self.postponed - {*joined})

    def rank_of(self, member: Member) -> int | None:
        return self.members.index(member) if member in self.members else None

    def local_ranks(self, member: Member) -> tuple[int, int]:
        """The member's rank among the workers of its node, and their number."""
        local = [other for other in self.members if other.node == member.node]
        return local.index(member), len(local)

    def previous_ranks(self, before: Generation) -> tuple[int | None, ...]:
        """By rank: the member's rank in an earlier generation, or None if it was not in it."""
        ranks = {member: rank for rank, member in enumerate(before.members)}
        return tuple(map(ranks.get, self.members))

    def to_json(self) -> str:
        values = asdict(self) | {
            "joined": sorted(self.joined),
            "postponed": sorted(self.postponed),
            "left": {str(member): why for member, why in self.left.items()},
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str | bytes) -> Generation:
        values: dict[str, Any] = json.loads(text)
        return cls(
            values["number"],
            tuple(Member(*member) for member in values["members"]),
            frozenset(Member(*member) for member in values["joined"]),
            {Member.parse(member): why for member, why in values["left"].items()},
            frozenset(Member(*member) for member in values["postponed"]),
            values["is_urgent"],
        )
