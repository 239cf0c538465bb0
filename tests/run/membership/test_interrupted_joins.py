"""A newcomer that has taken over the state when others die, and that reads only the last of several generations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from fake_workers import FakeNode, fake_node

from paceline.comm.single import SingleCommunicator
from paceline.core.errors import CommunicationError
from paceline.core.world import World
from paceline.run.launching.worker_exit import ExitKind, WorkerExit
from paceline.run.membership import communicator as communicator_module
from paceline.run.membership.board import Activity
from paceline.run.membership.communicator import ElasticCommunicator
from paceline.run.membership.generation import Member
from paceline.run.membership.member import Membership

NEWCOMER = Member(0, 2, 1)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    """Four workers, of which the third one was replaced; its replacement is let in."""
    with ExitStack() as stack:
        own = stack.enter_context(fake_node(tmp_path / "start", 4, max_restarts=1))
        own.enter_all()
        own.end(2)
        own.enter_all()
        own.look()
        own.ready(2)
        own.look()
        assert own.generation.joined == {NEWCOMER}
        yield own


def newcomer(node: FakeNode, patch: pytest.MonkeyPatch, waits: Callable[[], object]) -> ElasticCommunicator:
    """It has the state, and connects to its peers no more. waits: called while it waits to join again."""
    made = cast("Any", object.__new__(ElasticCommunicator))
    made.membership, made.generation, made.is_joining = node.membership(2), node.generation, False
    made.world, made.timeout_s, made._backend = World(), 1.0, None
    made._inner, made._lock, made._links = SingleCommunicator(World(), 1.0), threading.Lock(), []
    patch.setattr(communicator_module, "connect", lambda *_: SingleCommunicator(World(), 1.0))
    patch.setattr(Membership, "rendezvous_point", lambda *_: None)
    patch.setattr(Membership, "note_rank", lambda *_: None)
    patch.setattr(Membership, "wait_for_newer", lambda *_: waits())
    return cast("ElasticCommunicator", made)


@pytest.mark.parametrize("has_entered", [False, True])
def test_two_deaths_while_a_worker_joins(node: FakeNode, monkeypatch: pytest.MonkeyPatch, has_entered: bool) -> None:
    """It joins again. has_entered: it has just noted that it can go on, and another node did not know that yet."""

    def let_in() -> None:
        assert (node.row(2).activity, node.row(2).entered) == (Activity.READY, -1)
        node.enter_all()
        node.look()

    own = newcomer(node, monkeypatch, let_in)
    node.end(0)
    node.end(1)
    assert node.generation.members == (Member(0, 3),)
    if has_entered:
        node.row(2).note_entered(own.generation)
    assert own.rejoin().members == (Member(0, 3), NEWCOMER)
    assert own.is_joining, "it takes over the state again: the others have gone on"
    assert node.row(2).activity is not Activity.READY


def test_a_worker_that_was_let_in_again_before_it_noticed(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its activity still said that it was ready. Meanwhile the others have completed steps."""
    own = newcomer(node, monkeypatch, lambda: pytest.fail("it is in the newest generation"))
    node.end(0)
    node.enter_all()
    node.ready(2)
    node.look()
    assert node.generation.joined == {NEWCOMER}
    assert own.rejoin() == node.generation
    assert own.is_joining


def test_one_that_has_joined_does_not_join_again(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent of another node has announced the next generation first."""
    node.enter_all()

    def announce() -> bool:
        node.membership(0).ask_to_leave(Member(0, 0))
        node.look()
        return True

    own = newcomer(node, monkeypatch, announce)
    results: list[Any] = [CommunicationError("the others connect the next one"), own._inner]

    def connect(*_: Any) -> Any:
        if isinstance(result := results.pop(0), Exception):
            raise result
        return result

    monkeypatch.setattr(communicator_module, "connect", connect)
    assert own.rejoin().members == (Member(0, 1), Member(0, 3), NEWCOMER)
    assert not own.is_joining


def test_one_that_joins_again_can_be_asked_to_leave(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(Exception):
        pass

    def wait() -> None:
        raise Waits

    own = newcomer(node, monkeypatch, wait)
    node.row(2).note_entered(node.generation)
    node.end(0)  # as if decided by another node, which did not know that yet
    postponed = node.supervisor.generation.without({}, [NEWCOMER])
    node.supervisor._announce(postponed)
    with pytest.raises(Waits):
        own.rejoin()
    node.membership(1).ask_to_leave(NEWCOMER)
    node.look()
    ended = WorkerExit.read(node.folder, 2, -9)
    assert (ended.kind, ended.message) == (ExitKind.LEFT, "rank 2 left before it had joined")
