"""The agent's part of a run whose workers may change: announces the members, and starts replacements.

A worker that dies leaves the run, and the others continue with the step. If there are restarts left, a replacement is
started in its slot; it joins the others when it has set itself up. A stalled worker is ended (`stalls.py`) and then
counts as dead.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from paceline.core.notice import notice
from paceline.run.launching.fork_server import ForkServer
from paceline.run.launching.stalls import StallDetector
from paceline.run.launching.worker_exit import ExitKind, WorkerExit, reserve_space, write_in_start
from paceline.run.membership.board import Activity, Board
from paceline.run.membership.generation import Generation, Member
from paceline.run.membership.member import BOARD_FILE, GENERATION_FILE, leave_file
from paceline.run.membership.roster import Report, is_entered_by_all, next_generation

# The longest time that counts between two polls: if the agent itself was suspended, its workers did not stall.
MAX_INTERVAL_S = 1.0
MAX_BACK_OFF_S = 30.0
FINISH_S = 2.0
MAX_REPORTED_LOSSES = 32


@dataclass(frozen=True)
class Elastic:
    """How a run continues when workers die.

    min_workers: end the run if fewer are left. max_restarts: how many replacements are started on this node. stall_s:
    how long a micro-batch may take; None for a limit from the measured times.
    """

    min_workers: int
    max_restarts: int = 0
    stall_s: float | None = None


@dataclass
class _Slot:
    """A place for a worker."""

    member: Member
    num_failed_starts: int = 0  # in a row: replacements that died before they joined
    start_at_s: float = field(default=float("inf"))  # of the next replacement


class Consensus(Protocol):
    """How the agents of all nodes agree on generations."""

    @property
    def first(self) -> Generation:
        """The generation that this node begins with."""

    def exchange_reports(self, own: Report) -> tuple[Mapping[int, Report], Mapping[int, str]]:
        """Publish this node's report. Returns the reports of all nodes, and the lost nodes with reasons."""

    def propose(self, generation: Generation) -> None:
        """Make this the next generation, unless another one was decided first."""

    def decided(self, after: int) -> list[Generation]:
        """The decided generations with numbers above `after`."""

    def asked_to_leave(self) -> frozenset[Member]:
        """The members of this node that other nodes have asked to leave."""


class SingleNodeConsensus:
    """The consensus of a single node: its proposals are decided."""

    def __init__(self, first: Generation) -> None:
        self.first = self._newest = first

    def exchange_reports(self, own: Report) -> tuple[Mapping[int, Report], Mapping[int, str]]:
        return {0: own}, {}

    def propose(self, generation: Generation) -> None:
        if generation.number > self._newest.number:
            self._newest = generation

    def decided(self, after: int) -> list[Generation]:
        return [self._newest] if self._newest.number > after else []

    def asked_to_leave(self) -> frozenset[Member]:
        return frozenset()


class Supervisor:
    """Watches the workers of one start on this node. `start_replacement(slot, member)` starts a worker."""

    def __init__(
        self,
        options: Elastic,
        folder: Path,
        server: ForkServer,
        consensus: Consensus,
        slots: Sequence[Member],
        first_rank: int,
        start_replacement: Callable[[int, Member], None],
    ) -> None:
        self._options = options
        self._folder = folder
        self._server = server
        self._consensus = consensus
        self._first_rank = first_rank
        self._start_replacement = start_replacement
        self._node = slots[0].node
        self._slots = {member.slot: _Slot(member) for member in slots}
        folder.mkdir(exist_ok=True)
        self._board = Board.create(folder / BOARD_FILE, len(slots))
        self._stalls = StallDetector(self._board, server, folder, first_rank, options.stall_s)
        self._lost: dict[Member, str] = {}
        self._finished_s: dict[Member, float] = {}  # when members ended because their work is done
        self._leaving: dict[Member, str] = {}
        self._deaths: Counter[tuple[int, int]] = Counter()  # by slot and step
        self._num_replaced = 0
        self._polled_s = time.monotonic()
        self.generation = consensus.first
        self._announce(consensus.first)

    def note_exit(self, slot: int, ended: WorkerExit) -> WorkerExit:
        """A worker has ended. If the others continue without it, its exit becomes `LEFT`."""
        member = self._slots[slot].member
        has_joined = member in self.generation.members
        if ended.kind in (ExitKind.DONE, ExitKind.STOPPED):
            self._finished_s[member] = time.monotonic()
            return ended
        if ended.kind is ExitKind.LEFT and member not in self._leaving:
            again = "the others continue without this node; start the same command again to rejoin"
            return replace(ended, kind=ExitKind.COMMUNICATION, message=f"{ended.message}; {again}")
        if ended.kind not in (ExitKind.LEFT, ExitKind.DIED):
            return ended  # an exception in the user's code would recur
        if ended.kind is ExitKind.DIED and has_joined:  # one that was setting itself up was in no step
            step = self._board.row(slot).num_steps
            self._deaths[slot, step] += 1
            if 0 < self._options.max_restarts < self._deaths[slot, step]:
                times = f"{self._deaths[slot, step]} times at step {step + 1}"
                ended = ended.with_notes(f"its slot died {times}: the run ends, as it would recur")
                return replace(ended, is_final=True)
            if not self._can_continue(member):
                return ended
        self._server.kill_group(self._first_rank + slot)  # the processes that it started
        reason = ended.message.partition("\n")[0]
        self._lost[member] = reason
        if ended.kind is ExitKind.LEFT:
            notice(f"{reason}: {self._who_continues}")
            return ended
        self._advance()
        self._schedule_replacement(slot, has_joined=has_joined)
        what_follows = self._who_continues if has_joined else "it was about to join"
        notice(f"{reason}: {what_follows}")
        return replace(ended, kind=ExitKind.LEFT)

    def _can_continue(self, lost: Member) -> bool:
        """Whether enough workers are left to repeat the step."""
        reports, lost_nodes = self._consensus.exchange_reports(self._report())
        gone = {**self._lost, lost: "died"}
        gone |= {member: lost_nodes[member.node] for member in self.generation.members if member.node in lost_nodes}
        is_set_up = self.generation.number > 0 or is_entered_by_all(self.generation, reports, gone)
        left = [member for member in self.generation.members if member not in {*gone, *self._finished_s}]
        is_over = bool(self._finished_s) and not left
        has_state = any(member in left for member in self._with_state(reports))
        return is_over or (is_set_up and has_state and len(left) >= self._options.min_workers)

    @property
    def are_all_leaving(self) -> bool:
        """Whether all members of the run were asked to leave, and there are no others to take over its state."""
        reports, lost_nodes = self._consensus.exchange_reports(self._report())
        present = [report for node, report in reports.items() if node not in lost_nodes]
        leaving = {member for report in present for member in report.leaving}
        return all(member in leaving for report in present for member in report.entered)

    def _with_state(self, reports: Mapping[int, Report]) -> list[Member]:
        """The members that have the state of the run, without those that are still taking it over."""
        entered = {member: number for report in reports.values() for member, number in report.entered.items()}
        number, joined = self.generation.number, self.generation.joined
        return [
            member for member in self.generation.members if member not in joined or entered.get(member, -1) == number
        ]

    @property
    def _who_continues(self) -> str:
        count = sum(member not in self._lost for member in self.generation.members)
        return "1 worker continues" if count == 1 else f"{count} workers continue"

    @property
    def is_over(self) -> bool:
        """Whether only workers that have not joined are left, so there is nothing to join."""
        reports, lost_nodes = self._consensus.exchange_reports(self._report())
        lost = {member for report in reports.values() for member in report.lost} | self._finished_s.keys()
        return all(member in lost or member.node in lost_nodes for member in self._with_state(reports))

    def leave(self) -> None:
        """Let all workers of this node leave after a step."""
        self.end_replacing()
        for slot in self._slots.values():
            self._leaving[slot.member] = self._asked_to_leave(slot.member)

    def end_replacing(self) -> None:
        """Start no replacement any more."""
        self._options = replace(self._options, max_restarts=0)
        for slot in self._slots.values():
            slot.start_at_s = float("inf")

    def _asked_to_leave(self, member: Member) -> str:
        return f"rank {self._first_rank + member.slot} was asked to leave"

    def poll(self) -> None:
        """Called several times a second: let workers join and leave, start replacements, end stalled workers."""
        # Workers end one after the other. After FINISH_S, one that still runs has missed the end because of a loss.
        limit_s = time.monotonic() - FINISH_S
        self._lost |= {member: "it has finished" for member, at_s in self._finished_s.items() if at_s < limit_s}
        asked = self._consensus.asked_to_leave()
        for slot in self._slots.values():
            if slot.member in asked or leave_file(self._folder, slot.member).exists():
                self._leaving[slot.member] = self._asked_to_leave(slot.member)
        self._advance()
        now_s = time.monotonic()
        elapsed_s, self._polled_s = min(now_s - self._polled_s, MAX_INTERVAL_S), now_s
        for number, slot in self._slots.items():
            rank = self._first_rank + number
            if rank in self._server.exit_codes:
                if slot.start_at_s <= now_s:
                    self._replace(number)
            elif rank in self._server.pids:
                has_joined = slot.member in self.generation.members or self._board.row(number).entered >= 0
                if slot.member in self._leaving and not has_joined:
                    WorkerExit(ExitKind.LEFT, rank, f"rank {rank} left before it had joined").write(self._folder)
                    self._server.kill_group(rank)
                else:
                    self._stalls.check(number, elapsed_s)

    def _advance(self) -> None:
        """Propose the next generation, if there is a reason, and announce the decided ones."""
        reports, lost_nodes = self._consensus.exchange_reports(self._report())
        following = next_generation(self.generation, reports, lost_nodes)
        if following is not None and following.members:
            self._consensus.propose(following)
        for generation in self._consensus.decided(self.generation.number):
            self._announce(generation)
            # On the node of rank 0. Other losses are reported by their own node.
            if generation.members[0].node == self._node:
                for reason in dict.fromkeys(why for why in generation.left.values() if why in lost_nodes.values()):
                    notice(f"{reason}: {self._who_continues}")

    def _announce(self, generation: Generation) -> None:
        write_in_start(self._folder / GENERATION_FILE, generation.to_json().encode())
        self._board.announce(generation)
        self.generation = generation  # last: if a signal interrupts this, the next poll announces it again
        reserve_space(self._folder)

    def _report(self) -> Report:
        gone = {*self._lost, *self._finished_s}
        alive = {number: slot.member for number, slot in self._slots.items() if slot.member not in gone}
        ready = {member for number, member in alive.items() if self._board.row(number).activity is Activity.READY}
        entered = {member: self._board.row(number).entered for number, member in alive.items()}
        # A decision may have missed the newest losses. Older ones are irrelevant: runs may last for weeks.
        newest = {*list(self._lost)[-MAX_REPORTED_LOSSES:], *self.generation.members}
        lost = {member: why for member, why in self._lost.items() if member in newest}
        return Report(lost, dict(self._leaving), frozenset(ready), entered)

    # Replacements

    def _schedule_replacement(self, number: int, *, has_joined: bool) -> None:
        slot = self._slots[number]
        slot.num_failed_starts = 0 if has_joined else slot.num_failed_starts + 1
        if self._num_replaced < self._options.max_restarts:
            self._num_replaced += 1
            back_off_s = min(2.0 ** (slot.num_failed_starts - 1), MAX_BACK_OFF_S) if slot.num_failed_starts else 0.0
            slot.start_at_s = time.monotonic() + back_off_s

    def _replace(self, number: int) -> None:
        before = self._slots[number]
        member = before.member._replace(start=before.member.start + 1)
        self._slots[number] = _Slot(member, num_failed_starts=before.num_failed_starts)
        self._board.row(number).clear()
        self._stalls.forget(number)
        self._start_replacement(number, member)
