"""A `ForkServer` without processes: a test decides what its workers do and how they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.run.launching import stalls, supervisor
from paceline.run.launching.fork_server import ForkServer
from paceline.run.launching.supervisor import Elastic, SingleNodeConsensus, Supervisor
from paceline.run.launching.worker_exit import ExitKind, WorkerExit
from paceline.run.membership.board import Activity, Row
from paceline.run.membership.generation import Generation, Member
from paceline.run.membership.member import Membership


class FakeServer:
    """What a `Supervisor` uses of a `ForkServer`. Process ids are 1000 + rank."""

    def __init__(self, num_workers: int) -> None:
        self.pids = {rank: 1000 + rank for rank in range(num_workers)}
        self.exit_codes: dict[int, int] = {}
        self.killed: list[int] = []

    def kill_group(self, rank: int) -> None:
        self.killed.append(rank)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class FakeNode:
    """A supervisor and the workers that it believes to have."""

    def __init__(self, folder: Path, num_workers: int, patch: pytest.MonkeyPatch, **options: Any) -> None:
        self.server, self.clock = FakeServer(num_workers), Clock()
        self.replaced: list[Member] = []
        self.signals: list[tuple[int, int]] = []
        self.stopped: set[int] = set()  # process ids
        for module in (stalls, supervisor):
            patch.setattr(module, "time", self.clock)
        patch.setattr(stalls, "_is_stopped", lambda pid: pid in self.stopped)
        patch.setattr(stalls.os, "kill", lambda pid, number: self.signals.append((pid, number)))
        self.folder = folder
        self.members = [Member(0, slot) for slot in range(num_workers)]
        first = Generation.first({0: num_workers})
        elastic, server = Elastic(**{"min_workers": 1, **options}), cast("ForkServer", self.server)
        self.supervisor = Supervisor(
            elastic, folder, server, SingleNodeConsensus(first), first.members, 0, self._replace
        )

    def _replace(self, slot: int, member: Member) -> None:
        self.replaced.append(member)
        self.members[slot] = member
        del self.server.exit_codes[slot]

    @property
    def generation(self) -> Generation:
        return self.supervisor.generation

    def membership(self, slot: int) -> Membership:
        return Membership(self.members[slot], self.folder)

    def row(self, slot: int) -> Row:
        return self.membership(slot).row

    def enter_all(self) -> None:
        """All members of the newest generation complete their part of it."""
        for member in self.generation.members:
            self.row(member.slot).note_entered(self.generation)
            self.row(member.slot).enter(Activity.ELSEWHERE)

    def ready(self, slot: int) -> None:
        self.row(slot).enter(Activity.READY)

    def end(self, slot: int, kind: ExitKind = ExitKind.DIED, code: int = -9, message: str = "") -> WorkerExit:
        self.server.exit_codes[slot] = code
        return self.supervisor.note_exit(slot, WorkerExit(kind, slot, message or f"rank {slot} was killed"))

    def look(self, seconds: float = 0.1) -> None:
        """Let time pass, and the supervisor look at its workers."""
        self.clock.now_s += seconds
        self.supervisor.poll()


@contextmanager
def fake_node(folder: Path, num_workers: int = 3, **options: Any) -> Iterator[FakeNode]:
    with pytest.MonkeyPatch.context() as patch:
        yield FakeNode(folder, num_workers, patch, **options)


MakeNode = Callable[..., FakeNode]
