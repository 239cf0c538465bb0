"""The words that an agent and its workers share, in one process and across processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from paceline.run.membership.board import Activity, Board
from paceline.run.membership.generation import Generation, Member

FIRST = Generation.first({0: 3})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "board"


@pytest.fixture
def board(path: Path) -> Board:
    return Board.create(path, 3)


def test_a_new_board_is_blank(board: Board, path: Path) -> None:
    assert (board.newest, board.intact) == (0, 0)
    for slot in range(3):
        assert board.row(slot).activity is Activity.SETTING_UP
        assert (board.row(slot).num_ticks, board.row(slot).num_steps, board.row(slot).entered) == (0, 0, -1)
    assert [each.name for each in path.parent.iterdir()] == ["board"]


def test_only_a_loss_breaks_the_generations_before(board: Board, path: Path) -> None:
    worker = Board(path)
    joined = FIRST.changed({}, [Member(0, 0, 1)])
    assert joined is not None
    board.announce(joined)
    assert (worker.newest, worker.intact) == (1, 0)
    board.announce(joined.without({Member(0, 1): "died"}))
    assert (worker.newest, worker.intact) == (2, 2)


def test_rows_are_the_workers_own(board: Board, path: Path) -> None:
    rows = [Board(path).row(slot) for slot in range(3)]
    rows[1].enter(Activity.COMPUTING)
    rows[1].enter(Activity.WAITING)
    rows[1].note_steps(7)
    rows[2].note_entered(FIRST)
    assert [board.row(slot).activity for slot in range(3)] == [0, Activity.WAITING, 0]
    assert [board.row(slot).num_ticks for slot in range(3)] == [0, 2, 0]
    assert [board.row(slot).num_steps for slot in range(3)] == [0, 7, 0]
    assert [board.row(slot).entered for slot in range(3)] == [-1, -1, 0]
    board.row(1).clear()
    assert (board.row(1).activity, board.row(1).num_ticks, board.row(1).num_steps) == (Activity.SETTING_UP, 0, 0)
    assert board.row(2).entered == 0


@pytest.fixture
def other_process(board: Board, path: Path) -> Iterator[int]:
    """Enters COMPUTING in slot 2 and waits for generation 1; then notes it, and waits for 2."""
    assert board.newest == 0
    pid = os.fork()
    if not pid:
        try:
            own = Board(path)
            row = own.row(2)
            row.enter(Activity.COMPUTING)
            for number in (1, 2):
                while own.newest < number:
                    time.sleep(0.001)
                row.note_steps(own.newest)
            os._exit(own.intact)
        finally:
            os._exit(99)
    yield pid
    with_kill = os.waitpid(pid, os.WNOHANG) if Path(f"/proc/{pid}").exists() else (pid, 0)
    if not with_kill[0]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_processes_see_each_other(board: Board, other_process: int) -> None:
    wait_until(lambda: board.row(2).activity is Activity.COMPUTING)
    first = FIRST.without({Member(0, 1): "died"})
    board.announce(first)
    wait_until(lambda: board.row(2).num_steps == 1)
    joined = first.changed({}, [Member(0, 1, 1)])
    assert joined is not None
    board.announce(joined)
    wait_until(lambda: board.row(2).num_steps == 2)
    assert os.waitstatus_to_exitcode(os.waitpid(other_process, 0)[1]) == 1  # intact: joining breaks nothing
