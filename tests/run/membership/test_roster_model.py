"""Any order of deaths, joins, leaves, delays and lost nodes: agents that decide from old reports agree on one history.

Agents share a store that keeps the first decision for each number. What an agent knows of the others is what they have
published and it has read, which may be long ago. A worker knows what its agent has read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.run.membership.generation import Generation, Member
from paceline.run.membership.roster import Report, next_generation

NODES = {0: 2, 1: 2, 2: 1}
SLOTS = [(node, slot) for node, count in NODES.items() for slot in range(count)]
a_node = st.sampled_from([*NODES])
a_slot = st.sampled_from(SLOTS)


@dataclass
class Worker:
    member: Member
    is_alive: bool = True
    is_joining: bool = False
    is_ready: bool = False  # to join
    has_state: bool = False
    entered: int = -1
    seen: int = -1


@dataclass
class Agent:
    known: Generation
    published: Report
    is_alive: bool = True
    lost: dict[Member, str] = field(default_factory=dict)
    leaving: dict[Member, str] = field(default_factory=dict)
    proposed: list[Generation] = field(default_factory=list)


class Rosters(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        first = Generation.first(NODES)
        self.workers = {m[:2]: Worker(m, has_state=True, entered=0) for m in first.members}
        self.history = [first]  # the store
        self.met = {0}  # generations all of whose members have met
        self.holders = {*first.members}  # who has had the state of the run, dead or alive
        self.agents = {node: Agent(first, Report()) for node in NODES}
        self.suspected: set[int] = set()  # nodes whose heartbeat seems to have stopped
        for node in NODES:
            self.publish(node)

    def workers_of(self, node: int) -> Iterator[Worker]:
        return (worker for worker in self.workers.values() if worker.member.node == node)

    def by_member(self, member: Member) -> Worker | None:
        worker = self.workers[member[:2]]
        return worker if worker.member == member and worker.is_alive else None

    def report(self, node: int) -> Report:
        agent, alive = self.agents[node], [worker for worker in self.workers_of(node) if worker.is_alive]
        ready = frozenset(worker.member for worker in alive if worker.is_ready)
        return Report(dict(agent.lost), dict(agent.leaving), ready, {w.member: w.entered for w in alive})

    # What happens

    @rule(slot=a_slot)
    def die(self, slot: tuple[int, int]) -> None:
        worker = self.workers[slot]
        if worker.is_alive:
            worker.is_alive = False
            self.agents[slot[0]].lost[worker.member] = "died"

    @rule(slot=a_slot)
    def replace(self, slot: tuple[int, int]) -> None:
        before = self.workers[slot]
        if not before.is_alive and self.agents[slot[0]].is_alive:
            self.workers[slot] = Worker(before.member._replace(start=before.member.start + 1), is_joining=True)

    @rule(slot=a_slot)
    def get_ready(self, slot: tuple[int, int]) -> None:
        worker = self.workers[slot]
        worker.is_ready |= worker.is_alive and worker.is_joining

    @rule(slot=a_slot)
    def ask_to_leave(self, slot: tuple[int, int]) -> None:
        """One that has not joined is ended by its agent."""
        worker = self.workers[slot]
        if worker.is_joining:
            self.die(slot)
        elif worker.is_alive:
            self.agents[slot[0]].leaving[worker.member] = "asked"

    @precondition(lambda self: sum(agent.is_alive for agent in self.agents.values()) > 1)
    @rule(node=a_node)
    def lose_node(self, node: int) -> None:
        self.agents[node].is_alive = False
        for worker in self.workers_of(node):
            worker.is_alive = False

    @rule(node=a_node)
    def suspect(self, node: int) -> None:
        self.suspected ^= {node}

    @rule(node=a_node)
    def publish(self, node: int) -> None:
        if self.agents[node].is_alive:
            self.agents[node].published = self.report(node)

    @rule(node=a_node)
    def read(self, node: int) -> None:
        if self.agents[node].is_alive:
            self.agents[node].known = self.history[-1]

    @rule(node=a_node)
    def propose(self, node: int) -> None:
        """From its own report, the others' old ones, and a generation that may not be the newest any more."""
        agent = self.agents[node]
        if not agent.is_alive:
            return
        reports = {other: each.published for other, each in self.agents.items()} | {node: self.report(node)}
        following = next_generation(agent.known, reports, dict.fromkeys(self.suspected - {node}, "silent"))
        if following is not None and following.members:
            agent.proposed.append(following)

    @rule(node=a_node)
    def decide(self, node: int) -> None:
        """Write what was proposed, perhaps long ago, unless another decision was first."""
        agent = self.agents[node]
        own = next((each for each in agent.proposed if each.number == len(self.history)), None)
        if agent.is_alive and own is not None:
            self.check_new(own)
            self.history.append(own)

    @rule(slot=a_slot)
    def look(self, slot: tuple[int, int]) -> None:
        """A worker that is not in the generation that its agent knows waits to join it, or leaves."""
        worker, generation = self.workers[slot], self.agents[slot[0]].known
        if not worker.is_alive or worker.seen == generation.number:
            return
        worker.seen = generation.number
        if worker.member in generation.members:
            return
        worker.is_joining |= worker.member in generation.postponed
        if worker.is_joining and worker.member not in self.agents[slot[0]].leaving:
            worker.is_ready, worker.has_state = True, False
        else:
            reasons = [each.left[worker.member] for each in self.history if worker.member in each.left]
            assert reasons or worker.member in self.agents[slot[0]].leaving, "it leaves although nobody removed it"
            worker.is_alive = False

    @rule()
    def meet(self) -> None:
        """All members connect: possible as long as all of them live and know of it."""
        newest = self.history[-1]
        members = [self.by_member(member) for member in newest.members]
        if all(worker is not None and self.agents[worker.member.node].known == newest for worker in members):
            self.met.add(newest.number)

    @rule(slot=a_slot)
    def enter(self, slot: tuple[int, int]) -> None:
        worker, generation = self.workers[slot], self.agents[slot[0]].known
        if worker.is_alive and worker.member in generation.members and generation.number in self.met:
            worker.is_joining, worker.is_ready, worker.has_state = False, False, True
            worker.entered = worker.seen = generation.number
            self.holders.add(worker.member)

    # What must hold

    def check_new(self, new: Generation) -> None:
        before = self.history[-1]
        assert new.number == before.number + 1
        assert len({*new.members}) == len(new.members)
        nodes = [member.node for member in new.members]
        assert sum(a != b for a, b in pairwise(nodes)) + 1 == len({*nodes}), "not consecutive"
        assert new.members[0] in self.holders, "rank 0 has no state"
        if new.is_urgent:
            assert {*new.members} < {*before.members}
            present = [worker for member in new.members if (worker := self.by_member(member)) is not None]
            assert all(worker.has_state for worker in present), "a newcomer in an urgent generation"
        else:
            assert before.number in self.met, "members of the one before have not entered it"
        assert not {*new.members} & {*new.left}
        assert {*before.members} - {*new.members} <= {*new.left, *new.postponed}, "somebody left without a reason"

    @invariant()
    def all_know_the_same_history(self) -> None:
        for agent in self.agents.values():
            assert self.history[agent.known.number] == agent.known

    def teardown(self) -> None:
        """When nothing more happens and messages arrive, all who live are in the newest generation."""
        self.suspected = {node for node, agent in self.agents.items() if not agent.is_alive}
        for _ in range(4 * len(SLOTS)):
            for slot in SLOTS:
                self.look(slot)
                self.get_ready(slot)
                self.enter(slot)
            for node in NODES:
                self.publish(node)
                self.propose(node)
                self.decide(node)
            for node in NODES:
                self.read(node)
            self.meet()
        newest = self.history[-1]
        alive = [worker for worker in self.workers.values() if worker.is_alive]
        if any(worker.has_state and worker.member in newest.members for worker in alive):
            assert {worker.member for worker in alive} == {*newest.members}
            assert all(worker.entered == newest.number for worker in alive)


TestAnyOrder = Rosters.TestCase
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@pytest.mark.soak
class TestAnyOrderForLong(Rosters.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(max_examples=1500, stateful_step_count=60, deadline=None)
