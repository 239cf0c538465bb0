"""A run's folders: opened for one run, told from others in the same place, older courses moved aside."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import threading
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from checkpoint_state import save_steps

from paceline.checkpoint.errors import CheckpointError, LockedError
from paceline.checkpoint.folders import complete_steps, partial_folder
from paceline.checkpoint.run_folder import IDENTIFIER_NAME, RunFolder, memory_folder, run_lock
from paceline.comm.single import SingleCommunicator
from paceline.core.world import World


def opened(root: Path, *, with_memory: bool = False) -> RunFolder:
    return RunFolder(root, SingleCommunicator(World()), with_memory=with_memory)


def test_opening_cleans_up_and_keeps_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.run_folder.LOCK_TIMEOUT_S", 0.0)
    save_steps(tmp_path, 1, 2)
    partial_folder(tmp_path, 3, "12ab").mkdir()
    folder = opened(tmp_path)
    assert not partial_folder(tmp_path, 3, "12ab").exists()
    assert folder.found() == [tmp_path / "step-00000001", tmp_path / "step-00000002"]
    with pytest.raises(LockedError, match="is in use by process"):
        opened(tmp_path)
    folder.close()
    opened(tmp_path).close()


def test_the_next_owner_waits_for_the_lock_of_a_host_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system releases it only after a minute or two."""
    communicator = SingleCommunicator(World(is_joining=True))
    folder = RunFolder(tmp_path, communicator)
    communicator.world = World()
    monkeypatch.setattr("paceline.checkpoint.run_folder.LOCK_TIMEOUT_S", 0.0)
    with ExitStack() as lost:
        lost.enter_context(run_lock(tmp_path))
        monkeypatch.setattr("paceline.checkpoint.run_folder.sleep", lambda _: lost.close())
        folder.reconnect()
    folder.close()


def test_a_new_start_waits_for_the_lock_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job whose host was lost is often started again on another one within seconds."""
    monkeypatch.setattr("paceline.checkpoint.run_folder.LOCK_TIMEOUT_S", 0.0)
    monkeypatch.setattr("socket.gethostname", lambda: "node-1")
    with ExitStack() as lost:
        lost.enter_context(run_lock(tmp_path))
        monkeypatch.setattr("socket.gethostname", lambda: "node-2")
        monkeypatch.setattr("paceline.checkpoint.run_folder.sleep", lambda _: lost.close())
        opened(tmp_path).close()
    err = capsys.readouterr().err
    assert f"{tmp_path} is in use by process {os.getpid()} on node-1 since " in err
    assert err.endswith(": waiting up to 180 s, in case that host is down\n")
    assert (tmp_path / ".lock").read_bytes().startswith(f"process {os.getpid()} on node-2 since ".encode())


def test_the_identifier_stays_with_the_folder_and_a_damaged_one_is_made_anew(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.close()
    again = opened(tmp_path)
    again.close()
    assert first.memory == again.memory
    (tmp_path / IDENTIFIER_NAME).write_text("../../etc\n")
    other = opened(tmp_path)
    other.close()
    assert other.memory.parent == Path("/dev/shm")
    assert other.memory != first.memory


def test_snapshots_are_found_beside_checkpoints_and_those_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    folder = opened(tmp_path, with_memory=True)
    folder.make_memory()
    try:
        save_steps(folder.memory, 5)
        save_steps(tmp_path, 4)
        assert folder.found() == [tmp_path / "step-00000004", folder.memory / "step-00000005"]
        assert folder.discard(folder.found()) == tmp_path / "set-aside-1"
        assert folder.found() == []
        folder.close()
        (tmp_path / IDENTIFIER_NAME).unlink()
        opened(tmp_path).close()
        assert not folder.memory.exists()
    finally:
        folder.remove_memory()


def test_memory_that_cannot_be_written_to_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))

    monkeypatch.setattr("paceline.checkpoint.run_folder.private_folder", read_only)
    folder = opened(tmp_path, with_memory=True)
    message = (
        f"^snapshots cannot be kept in /dev/shm: Read-only file system .{folder.memory}.; set snapshot_every=None$"
    )
    with pytest.raises(CheckpointError, match=message):
        folder.make_memory()
    folder.close()


def test_a_snapshot_is_hidden_before_it_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = opened(tmp_path, with_memory=True)
    folder.make_memory()
    try:
        (snapshot,) = save_steps(folder.memory, 5)
        with monkeypatch.context() as patch:  # killed while it deletes
            patch.setattr("shutil.rmtree", lambda path, **_: (path / "model.json").unlink())
            folder.discard([snapshot])
        assert folder.found() == []
        folder.close()
    finally:
        folder.remove_memory()


def test_a_folder_that_another_run_has_locked_is_not_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for timeout in ("LOST_LOCK_TIMEOUT_S", "ABANDONED_LOCK_TIMEOUT_S"):
        monkeypatch.setattr(f"paceline.checkpoint.run_folder.{timeout}", 0.0)
    communicator = SingleCommunicator(World(is_joining=True))
    folder = RunFolder(tmp_path, communicator)
    communicator.world = World()
    with run_lock(tmp_path):
        in_progress = partial_folder(tmp_path, 3, "12ab")
        in_progress.mkdir()
        with pytest.raises(LockedError):
            folder.reconnect()
        folder.close(is_abandoned=True)
        assert in_progress.exists()
    folder.reconnect()
    assert not in_progress.exists()
    folder.close()


def test_a_folder_that_vanished_is_not_created_again(tmp_path: Path) -> None:
    folder = opened(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(CheckpointError, match="checkpoints cannot be saved in"):
        folder.reconnect()
    folder.close(is_abandoned=True)
    assert not (tmp_path / "run").exists()


def test_folders_in_memory_are_named_by_place_and_run(tmp_path: Path) -> None:
    names = {memory_folder(root, run).name for root in (tmp_path / "a", tmp_path / "b") for run in ("1", "2")}
    assert len(names) == 4
    assert memory_folder(tmp_path / "x" / ".." / "a", "1") == memory_folder(tmp_path / "a", "1")


def test_discarded_steps_are_moved_whole_into_numbered_folders(tmp_path: Path) -> None:
    saved = save_steps(tmp_path, 1, 2, 3)
    folder = opened(tmp_path)
    assert folder.discard([]) is None
    assert folder.discard(saved[1:]) == tmp_path / "set-aside-1"
    save_steps(tmp_path, 2)
    assert folder.discard([saved[1]]) == tmp_path / "set-aside-2"
    folder.close()
    assert complete_steps(tmp_path) == [1]
    assert complete_steps(tmp_path / "set-aside-1") == [2, 3]
    assert complete_steps(tmp_path / "set-aside-2") == [2]


def test_a_lock_that_is_released_in_time_is_taken(tmp_path: Path) -> None:
    holder = ExitStack()
    holder.enter_context(run_lock(tmp_path))
    releasing = threading.Timer(0.2, holder.close)
    releasing.start()
    with run_lock(tmp_path, timeout_s=20.0):
        pass
    releasing.join()


# The lock

CONTEXT = multiprocessing.get_context("fork")


def test_a_second_writer_is_kept_out_and_told_who_is_there(tmp_path: Path) -> None:
    with (
        run_lock(tmp_path),
        pytest.raises(LockedError, match=rf"{tmp_path} is in use by process {os.getpid()} on \S+ since 20"),
    ):
        run_lock(tmp_path).__enter__()
    with run_lock(tmp_path):
        pass


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as Lustre mounted without `flock`, where no user can choose another folder."""

    def unsupported(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", unsupported)
    with run_lock(tmp_path):
        assert f"the file system of {tmp_path} has no locks: start no second run in this folder" in caplog.text


def hold(folder: Path, connection: Connection) -> None:
    with run_lock(folder):
        # A data-loading process that outlives the worker for a while.
        child = os.fork()
        if child == 0:
            signal.pause()
        connection.send(child)
        signal.pause()


def test_a_killed_holder_holds_nothing_even_if_its_children_live(tmp_path: Path) -> None:
    here, there = CONTEXT.Pipe()
    holder = CONTEXT.Process(target=hold, args=(tmp_path, there))
    holder.start()
    assert here.poll(20)
    child = here.recv()
    try:
        with pytest.raises(LockedError, match=f"in use by process {holder.pid} on"):
            run_lock(tmp_path).__enter__()
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()  # not with a time-out: that would wait for the child too
        with run_lock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
