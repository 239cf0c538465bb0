"""What an agent does about its workers, without any: deaths, replacements, leaving, and workers that stand still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fake_workers import FakeNode, MakeNode, fake_node

from paceline.run.launching import supervisor, worker
from paceline.run.launching.stalls import MIN_STALL_S, STALL_FACTOR, STOPPED_S
from paceline.run.launching.supervisor import FINISH_S, MAX_BACK_OFF_S, MAX_REPORTED_LOSSES
from paceline.run.launching.worker_exit import ExitKind, WorkerExit
from paceline.run.membership.board import Activity
from paceline.run.membership.generation import Member

STACK = 'Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 12 in loss_of\n'


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MakeNode]:
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(fake_node(tmp_path / "start", *args, **options))


def test_the_others_go_on_without_one_that_died(node: MakeNode, capfd: pytest.CaptureFixture[str]) -> None:
    own = node(3)
    own.enter_all()
    assert own.end(1).kind is ExitKind.LEFT
    assert own.generation.members == (Member(0, 0), Member(0, 2))
    assert own.generation.is_urgent
    assert own.generation.left == {Member(0, 1): "rank 1 was killed"}
    assert own.membership(0).newest() == own.generation
    assert own.server.killed == [1]  # what it had started
    assert "rank 1 was killed: 2 workers continue" in capfd.readouterr().err
    own.look()
    assert not own.replaced
    own.enter_all()
    own.end(2)
    assert "rank 2 was killed: 1 worker continues" in capfd.readouterr().err


def test_reports_do_not_grow_with_the_losses_of_weeks(node: MakeNode) -> None:
    own = node(2, max_restarts=1000)
    own.enter_all()
    for start in range(100):
        assert own.end(1).kind is ExitKind.LEFT
        own.look()
        assert own.replaced[-1] == Member(0, 1, start + 1)
        own.enter_all()
        own.ready(1)
        own.look()
        assert own.generation.members == (Member(0, 0), Member(0, 1, start + 1))
        own.enter_all()
    lost = own.supervisor._report().lost
    assert list(lost) == [Member(0, 1, start) for start in range(100 - MAX_REPORTED_LOSSES, 100)]


def test_rank_0_is_a_worker_like_any_other(node: MakeNode) -> None:
    own = node(2)
    own.enter_all()
    assert own.end(0).kind is ExitKind.LEFT
    assert own.generation.members == (Member(0, 1),)


@pytest.mark.parametrize(
    ("min_workers", "kinds"),
    [(1, [ExitKind.LEFT, ExitKind.LEFT]), (2, [ExitKind.LEFT, ExitKind.DIED]), (3, [ExitKind.DIED, ExitKind.DIED])],
)
def test_too_few_are_left(node: MakeNode, min_workers: int, kinds: list[ExitKind]) -> None:
    own = node(3, min_workers=min_workers)
    own.enter_all()
    assert [own.end(slot).kind for slot in (0, 1)] == kinds


def test_a_death_before_all_are_set_up_ends_them_all(node: MakeNode) -> None:
    own = node(3, max_restarts=2)
    own.row(0).note_entered(own.generation)
    assert own.end(1).kind is ExitKind.DIED
    assert own.generation.number == 0


@pytest.mark.parametrize("kind", [ExitKind.FAILED, ExitKind.COMMUNICATION, ExitKind.STOPPED, ExitKind.TERMINATED])
def test_other_exits_are_not_deaths(node: MakeNode, kind: ExitKind) -> None:
    own = node(3)
    own.enter_all()
    assert own.end(1, kind).kind is kind
    assert own.generation.number == 0


def test_a_worker_that_is_done_is_not_waited_for(node: MakeNode) -> None:
    own = node(2)
    own.enter_all()
    assert own.end(1, ExitKind.DONE, 0).kind is ExitKind.DONE
    own.look()
    assert own.generation.number == 0  # the other one may be about to end too
    assert not own.supervisor.is_over
    own.look(FINISH_S)
    assert own.generation.left == {Member(0, 1): "it has finished"}
    own.end(0, ExitKind.DONE, 0)
    assert own.supervisor.is_over


def test_a_replacement_joins_when_it_is_ready(node: MakeNode) -> None:
    own = node(3, max_restarts=1)
    own.enter_all()
    own.end(1)
    own.enter_all()
    own.look()
    replacement = Member(0, 1, 1)
    assert own.replaced == [replacement]
    own.look()
    assert replacement not in own.generation.members  # it sets itself up
    own.ready(1)
    own.look()
    assert own.generation.members == (Member(0, 0), Member(0, 2), replacement)
    assert own.generation.joined == {replacement}
    assert not own.generation.is_urgent


def test_a_replacement_waits_until_all_have_entered_the_generation_before(node: MakeNode) -> None:
    own = node(3, max_restarts=1)
    own.enter_all()
    own.end(1)
    own.look()
    own.ready(1)
    own.row(0).note_entered(own.generation)
    own.look()
    assert own.generation.number == 1
    own.enter_all()
    own.look()
    assert own.generation.number == 2


def test_there_are_max_restarts_replacements(node: MakeNode) -> None:
    own = node(3, max_restarts=2)
    own.enter_all()
    for slot in range(2):
        own.row(slot).note_steps(slot)
        own.end(slot)
        own.enter_all()
        own.look()
        own.ready(slot)
        own.look()
        own.enter_all()
    own.row(2).note_steps(9)
    own.end(2)
    own.look(1000)
    assert own.replaced == [Member(0, 0, 1), Member(0, 1, 1)]
    assert own.generation.members == (Member(0, 0, 1), Member(0, 1, 1))


def test_replacements_that_die_before_they_join_come_later_and_later(node: MakeNode) -> None:
    own = node(2, max_restarts=9)
    own.enter_all()
    own.row(1).note_steps(5)
    own.end(1)
    own.enter_all()
    generation, waited_s = own.generation, []
    for step in range(8):
        before_s, count = own.clock.now_s, len(own.replaced)
        while len(own.replaced) == count:
            own.look(0.5)
        waited_s.append(own.clock.now_s - before_s)
        own.row(1).note_steps(100 + step)  # never twice at the same
        assert own.end(1).kind is ExitKind.LEFT
    assert waited_s == [0.5, 1, 2, 4, 8, 16, MAX_BACK_OFF_S, MAX_BACK_OFF_S]
    assert own.generation == generation  # the other one was never disturbed


def test_a_slot_that_dies_again_and_again_at_the_same_step_ends_the_run(node: MakeNode) -> None:
    own = node(2, max_restarts=2)
    own.enter_all()
    for _ in range(2):
        own.row(1).note_steps(4)
        assert own.end(1).kind is ExitKind.LEFT
        own.enter_all()
        own.look()
        own.ready(1)
        own.look()
        own.enter_all()
    own.row(1).note_steps(4)
    ended = own.end(1)
    assert (ended.kind, ended.is_final) == (ExitKind.DIED, True)
    assert "its slot died 3 times at step 5: the run ends, as it would recur" in ended.message


def test_a_replacement_that_dies_before_it_joins_was_in_no_step(node: MakeNode) -> None:
    """The first death was in the first step, and a replacement that sets itself up has not begun it either."""
    own = node(2, max_restarts=1)
    own.enter_all()
    assert own.end(1).kind is ExitKind.LEFT
    own.enter_all()
    own.look()
    assert own.replaced == [Member(0, 1, 1)]
    assert own.end(1).kind is ExitKind.LEFT
    assert own.generation.members == (Member(0, 0),)


def test_space_is_reserved_again(node: MakeNode) -> None:
    """After a disk was full for a while."""
    own = node(3)
    own.enter_all()
    [reserved] = own.folder.glob("reserved*")
    reserved.unlink()
    own.end(1)
    assert reserved.exists()


@pytest.mark.parametrize("dies_too", [False, True])
def test_a_signal_while_a_generation_is_announced(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch, dies_too: bool
) -> None:
    """The launcher then ends, and first lets the others save: they must know of the loss."""
    own = node(3)
    own.enter_all()
    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "write_in_start", lambda *_: exit(143))
        with pytest.raises(SystemExit):
            own.end(1)
    if dies_too:  # before it was announced
        own.end(2)
    own.look()
    assert own.membership(0).newest() == own.generation
    assert own.generation.members == ((Member(0, 0),) if dies_too else (Member(0, 0), Member(0, 2)))
    assert own.membership(0).board.intact == own.generation.number


def test_a_death_during_a_join_postpones_it(node: MakeNode) -> None:
    own = node(3, max_restarts=1)
    own.enter_all()
    own.end(1)
    own.enter_all()
    own.look()
    own.ready(1)
    own.look()
    own.end(0)  # before all have entered
    newcomer = Member(0, 1, 1)
    assert own.generation.members == (Member(0, 2),)
    assert own.generation.postponed == {newcomer}
    own.enter_all()
    own.ready(1)
    own.look()
    assert own.generation.members == (Member(0, 2), newcomer)


def join(own: FakeNode, slot: int) -> None:
    """A worker dies, and its replacement is let in; nobody has entered that generation yet."""
    own.enter_all()
    own.row(slot).note_steps(1)
    own.end(slot)
    own.enter_all()
    own.look()
    own.ready(slot)
    own.look()
    assert own.generation.joined == {Member(0, slot, 1)}


def test_a_run_that_ends_during_a_join_does_not_wait_for_it(node: MakeNode) -> None:
    own = node(2, max_restarts=1)
    join(own, 1)
    assert not own.supervisor.is_over
    own.end(0, ExitKind.DONE, 0)
    assert own.supervisor.is_over


def test_a_run_that_stops_during_a_join_does_not_wait_for_it(node: MakeNode) -> None:
    own = node(2, max_restarts=1)
    join(own, 1)
    own.end(0, ExitKind.STOPPED, 75)
    assert own.supervisor.is_over


def test_a_node_that_the_others_have_lost_says_so(node: MakeNode) -> None:
    own = node(3)
    own.enter_all()
    ended = own.end(1, ExitKind.LEFT, 0, "rank 1 left: node a sent no heartbeat for 1.5 s")
    assert ended.kind is ExitKind.COMMUNICATION
    assert "start the same command again to rejoin" in ended.message


def test_a_node_that_leaves_replaces_nobody(node: MakeNode) -> None:
    own = node(3, max_restarts=2)
    own.enter_all()
    own.end(1)
    own.supervisor.leave()
    own.end(2)
    own.look()
    assert not own.replaced


def test_all_are_leaving(node: MakeNode) -> None:
    own = node(3)
    own.enter_all()
    own.membership(0).ask_to_leave(Member(0, 1))
    own.look()
    assert not own.supervisor.are_all_leaving
    own.supervisor.leave()
    assert own.supervisor.are_all_leaving


def test_the_last_one_with_the_state_dies_during_a_join(node: MakeNode) -> None:
    own = node(2, max_restarts=1)
    join(own, 1)
    assert own.end(0).kind is ExitKind.DIED


def test_one_that_has_taken_over_the_state_goes_on_alone(node: MakeNode) -> None:
    own = node(2, max_restarts=1)
    join(own, 1)
    own.row(1).note_entered(own.generation)
    assert own.end(0).kind is ExitKind.LEFT
    assert own.generation.members == (Member(0, 1, 1),)


def test_a_worker_is_asked_to_leave(node: MakeNode, capfd: pytest.CaptureFixture[str]) -> None:
    own = node(3)
    own.membership(0).ask_to_leave(Member(0, 1))
    own.look()
    assert own.generation.number == 0  # it leaves after a step, when all are set up
    own.enter_all()
    own.look()
    assert own.generation.left == {Member(0, 1): "rank 1 was asked to leave"}
    assert not own.generation.is_urgent
    assert own.end(1, ExitKind.LEFT, 0, "rank 1 left: it was asked to").kind is ExitKind.LEFT
    assert own.server.killed == [1]  # what it had started
    assert "rank 1 left: it was asked to: 2 workers continue" in capfd.readouterr().err
    own.look(100)
    assert not own.replaced


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_worker_that_is_asked_to_leave_before_it_joins_is_ended(node: MakeNode, is_ready: bool) -> None:
    own = node(3, max_restarts=1)
    own.enter_all()
    own.end(1)
    own.look()  # nobody has entered the generation since: the replacement cannot join yet
    if is_ready:
        own.ready(1)
    own.server.killed.clear()
    own.membership(0).ask_to_leave(own.members[1])
    own.look()
    assert own.server.killed == [1]
    ended = WorkerExit.read(own.folder, 1, -9)
    assert (ended.kind, ended.message) == (ExitKind.LEFT, "rank 1 left before it had joined")
    assert own.end(1, ended.kind, message=ended.message).kind is ExitKind.LEFT
    assert own.supervisor._report().ready == frozenset()  # no other agent lets it in
    own.server.killed.clear()
    own.look()
    own.enter_all()
    own.look()
    assert not own.server.killed
    assert own.generation.members == (Member(0, 0), Member(0, 2))


# Workers that stand still


def stands_still(own: FakeNode, seconds: float, slot: int = 1) -> bool:
    """Whether a worker that began something and does nothing more is ended within this time."""
    for _ in range(int(seconds / 0.5)):
        own.look(0.5)
    return slot in own.server.killed


def test_a_micro_batch_may_take_stall_s(node: MakeNode, tmp_path: Path) -> None:
    own = node(3, stall_s=5.0)
    own.enter_all()
    own.row(1).enter(Activity.COMPUTING)
    assert not stands_still(own, 5.0)
    (tmp_path / "start" / "stack-1").write_text(f"1001\n{STACK}")
    assert stands_still(own, 3.0)
    assert own.signals == [(1001, worker.STACK_SIGNAL)]
    ended = WorkerExit.read(tmp_path / "start", 1, -9)
    assert ended.kind is ExitKind.DIED
    assert 'rank 1 stalled for 5.5 s, at File "/home/me/train.py", line 12, in loss_of, and was ended' in (
        ended.message.replace("6.0 s", "5.5 s")
    )
    assert own.end(1, ended.kind, message=ended.message).kind is ExitKind.LEFT  # a death like any other


@pytest.mark.parametrize("activity", [each for each in Activity if each is not Activity.COMPUTING])
def test_everything_else_may_take_any_time(node: MakeNode, activity: Activity) -> None:
    own = node(3, stall_s=5.0)
    own.enter_all()
    own.row(1).enter(activity)
    assert not stands_still(own, 100)


def test_a_worker_that_goes_on_does_not_stand_still(node: MakeNode) -> None:
    own = node(3, stall_s=5.0)
    own.enter_all()
    for _ in range(50):
        own.row(1).enter(Activity.COMPUTING)
        assert not stands_still(own, 1.0)


def test_without_stall_s_the_limit_follows_what_was_measured(node: MakeNode) -> None:
    own = node(3)
    own.enter_all()
    own.row(0).enter(Activity.COMPUTING)
    assert not stands_still(own, 20.0)  # compiles
    own.row(0).enter(Activity.WAITING)
    own.look()
    own.row(1).enter(Activity.COMPUTING)
    own.look()
    assert not stands_still(own, STALL_FACTOR * 19.0)
    assert stands_still(own, 60.0)


def test_the_limit_is_never_short(node: MakeNode) -> None:
    own = node(3)
    own.enter_all()
    own.row(1).enter(Activity.COMPUTING)
    assert not stands_still(own, MIN_STALL_S)
    assert stands_still(own, 3.0)


@pytest.mark.parametrize(("stall_s", "limit_s"), [(None, STOPPED_S), (3.0, 3.0), (60.0, STOPPED_S)])
def test_a_stopped_process(node: MakeNode, tmp_path: Path, stall_s: float | None, limit_s: float) -> None:
    own = node(3, stall_s=stall_s)
    own.enter_all()  # in whatever it does
    own.stopped.add(1001)
    assert not stands_still(own, limit_s - 0.5)
    assert stands_still(own, 3.0)
    message = WorkerExit.read(tmp_path / "start", 1, -9).message
    assert message.startswith("rank 1 was stopped for ")
    assert message.endswith(" s (SIGSTOP), and was ended")


def test_one_that_goes_on_while_its_stack_is_asked_for_lives(node: MakeNode) -> None:
    own = node(3)
    own.enter_all()
    own.stopped.add(1001)
    while not own.signals:
        own.look()
    own.stopped.clear()
    own.row(1).enter(Activity.ELSEWHERE)
    assert not stands_still(own, 3.0)
    own.stopped.add(1001)
    assert stands_still(own, STOPPED_S + 1.0)


def test_a_process_that_was_stopped_shortly_lives(node: MakeNode) -> None:
    own = node(3)
    own.enter_all()
    for _ in range(5):
        own.stopped.add(1001)
        assert not stands_still(own, STOPPED_S - 1)
        own.stopped.clear()
        own.look()


def test_the_agents_own_suspension_is_not_held_against_workers(node: MakeNode) -> None:
    own = node(3, stall_s=5.0)
    own.enter_all()
    own.row(1).enter(Activity.COMPUTING)
    own.look(0.1)
    own.look(3600)
    own.row(1).enter(Activity.COMPUTING)
    assert not stands_still(own, 3.0)
