"""Decides on the next generation from what the agents of all nodes report. Arithmetic only.

Any agent may decide, possibly from old reports: the first decision that reaches the store gets the generation's number.
Changes that a decision missed stay in the reports, and a later decision includes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.run.membership.generation import Generation, Member


@dataclass(frozen=True)
class Report:
    """The state of a node's workers, from its agent.

    lost: members that died or finished, with reasons. leaving: members that leave after a step. ready: workers that
    wait to join. entered: the generation that each running member is in.
    """

    lost: Mapping[Member, str] = field(default_factory=dict)
    leaving: Mapping[Member, str] = field(default_factory=dict)
    ready: frozenset[Member] = frozenset()
    entered: Mapping[Member, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "lost": {str(member): why for member, why in self.lost.items()},
            "leaving": {str(member): why for member, why in self.leaving.items()},
            "ready": sorted(map(str, self.ready)),
            "entered": {str(member): number for member, number in self.entered.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        return cls(
            {Member.parse(member): why for member, why in values["lost"].items()},
            {Member.parse(member): why for member, why in values["leaving"].items()},
            frozenset(map(Member.parse, values["ready"])),
            {Member.parse(member): number for member, number in values["entered"].items()},
        )


def next_generation(
    current: Generation, reports: Mapping[int, Report], lost_nodes: Mapping[int, str] | None = None
) -> Generation | None:
    """The generation after `current`, or None if it stays.

    reports: by node. lost_nodes: nodes that do not answer, with reasons.

    A generation that follows a loss excludes members that are still joining: the others may be in the middle of an
    operation that newcomers do not know. No worker joins or leaves before all members have entered the current
    generation, so that all enter the next one after the same step. The last members with the run's state leave after
    newcomers have taken it over.
    """
    lost_nodes = lost_nodes or {}
    lost = {member: why for report in reports.values() for member, why in report.lost.items()}
    known = (*current.members, *current.postponed)
    lost |= {member: lost_nodes[member.node] for member in known if member.node in lost_nodes}
    is_entered = is_entered_by_all(current, reports, lost)
    if not lost.keys().isdisjoint(current.members):
        return current.without(lost, () if is_entered else current.joined)
    if not is_entered:
        return None
    leaving = {member: why for report in reports.values() for member, why in report.leaving.items()}
    ready = {member for node, report in reports.items() if node not in lost_nodes for member in report.ready}
    if all(member in leaving for member in current.members):
        leaving = {}  # newcomers first take over the state
    return current.changed(leaving, ready - {*leaving})


def is_entered_by_all(
    generation: Generation, reports: Mapping[int, Report], lost: Mapping[Member, str] | None = None
) -> bool:
    """Whether all members, except lost ones, are in this generation."""
    entered = {member: number for report in reports.values() for member, number in report.entered.items()}
    return all(
        entered.get(member, -1) == generation.number for member in generation.members if member not in (lost or {})
    )
