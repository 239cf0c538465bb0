"""A run's folders: opened for one run, told from others in the same place, older courses moved aside."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from checkpoint_state import job, save_steps, world

from paceline.checkpoint.errors import CheckpointError, LockedError
from paceline.checkpoint.folders import complete_steps, partial_folder, set_aside
from paceline.checkpoint.lock import RunLock
from paceline.checkpoint.pieces import Disk
from paceline.checkpoint.run_folder import IDENTIFIER_NAME, RunFolder, memory_folder
from paceline.checkpoint.saving import save
from paceline.checkpoint.writer import AsyncWriter
from paceline.comm.single import SingleCommunicator
from paceline.core.world import World


def opened(root: Path, *, with_memory: bool = False) -> RunFolder:
    return RunFolder(root, SingleCommunicator(World()), Disk.SHARED, with_memory=with_memory)


def test_opening_cleans_up_and_keeps_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.run_folder.LOCK_PATIENCE_S", 0.0)
    save_steps(tmp_path, 1, 2)
    partial_folder(tmp_path, 3, "12ab").mkdir()
    folder = opened(tmp_path)
    assert not partial_folder(tmp_path, 3, "12ab").exists()
    assert folder.found() == [("disk", 1), ("disk", 2)]
    with pytest.raises(LockedError, match="is in use by process"):
        opened(tmp_path)
    folder.close()
    opened(tmp_path).close()


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
        assert folder.found() == [("disk", 4), ("memory", 5)]
        assert folder.path("memory", 5) == folder.memory / "step-00000005"
        assert folder.forget([4, 5]) == tmp_path / "set-aside-1"
        assert folder.found() == []
        folder.close()
        (tmp_path / IDENTIFIER_NAME).unlink()
        opened(tmp_path).close()
        assert not folder.memory.exists()
    finally:
        folder.remove_memory()


def test_folders_in_memory_are_named_by_place_and_run(tmp_path: Path) -> None:
    names = {memory_folder(root, run).name for root in (tmp_path / "a", tmp_path / "b") for run in ("1", "2")}
    assert len(names) == 4
    assert memory_folder(tmp_path / "x" / ".." / "a", "1") == memory_folder(tmp_path / "a", "1")


def test_set_aside_moves_whole_checkpoints_and_numbers_its_folders(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    assert set_aside(tmp_path, []) is None
    assert set_aside(tmp_path, [2, 3]) == tmp_path / "set-aside-1"
    save_steps(tmp_path, 2)
    assert set_aside(tmp_path, [2]) == tmp_path / "set-aside-2"
    assert complete_steps(tmp_path) == [1]
    assert complete_steps(tmp_path / "set-aside-1") == [2, 3]
    assert complete_steps(tmp_path / "set-aside-2") == [2]


def test_a_lock_that_is_released_in_time_is_taken(tmp_path: Path) -> None:
    holder = RunLock(tmp_path)
    releasing = threading.Timer(0.2, holder.close)
    releasing.start()
    with RunLock(tmp_path, patience_s=20.0):
        pass
    releasing.join()


def test_a_worker_that_leaves_does_not_wait_for_anothers_part(tmp_path: Path) -> None:
    writer = AsyncWriter(tmp_path, world(0, 2))
    writer.save(job(5))
    writer.abandon()
    with pytest.raises(CheckpointError, match="the run ended before rank 1 had written its part"):
        writer.close()
    assert complete_steps(tmp_path) == []


def test_without_flushing_the_same_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    save(tmp_path / "a", job(5))
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: pytest.fail("the disk was waited for"))
        with AsyncWriter(tmp_path / "b", flush=False) as writer:
            writer.save(job(5))
    files = [{path.name for path in (tmp_path / root / "step-00000005").iterdir()} for root in ("a", "b")]
    assert files[0] == files[1]
