"""One writer per run folder, and no lock outlives its process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from paceline.checkpoint.errors import LockedError
from paceline.checkpoint.lock import RunLock

CONTEXT = multiprocessing.get_context("fork")


def test_a_second_writer_is_kept_out_and_told_who_is_there(tmp_path: Path) -> None:
    with (
        RunLock(tmp_path),
        pytest.raises(LockedError, match=rf"{tmp_path} is in use by process {os.getpid()} on \S+ since 20"),
    ):
        RunLock(tmp_path)
    RunLock(tmp_path).close()


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.close()
    with RunLock(tmp_path), pytest.raises(LockedError):
        lock.close()
        RunLock(tmp_path)


def hold(folder: Path, connection: Connection) -> None:
    lock = RunLock(folder)
    # A data-loading process that outlives the worker for a while.
    child = os.fork()
    if child == 0:
        signal.pause()
    connection.send((lock.path.name, child))
    signal.pause()


def test_a_killed_holder_holds_nothing_even_if_its_children_live(tmp_path: Path) -> None:
    here, there = CONTEXT.Pipe()
    holder = CONTEXT.Process(target=hold, args=(tmp_path, there))
    holder.start()
    assert here.poll(20)
    _, child = here.recv()
    try:
        with pytest.raises(LockedError, match=f"in use by process {holder.pid} on"):
            RunLock(tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()  # not with a time-out: that would wait for the child too
        RunLock(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)
