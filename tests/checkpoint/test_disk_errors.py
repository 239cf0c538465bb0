"""A disk that is full, read-only or gone: the error says so, and what was saved before stays."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from checkpoint_state import Job, components, job, same, settled, world

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import clean_up, complete_steps
from paceline.checkpoint.manifest import Manifest, Pattern
from paceline.checkpoint.policy import Retention
from paceline.checkpoint.reader import Checkpoint, verify
from paceline.checkpoint.writer import AsyncWriter, Component

LARGE = 100_000


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a small disk needs root: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fail(writer: AsyncWriter, failing: Job) -> str:
    """The message of a save that fails, as a run that goes on would get it."""
    writer.save(*failing)
    error = settled(writer).poll()
    assert isinstance(error, CheckpointError)
    assert writer.poll() is None
    return str(error)


def test_a_full_disk_is_reported_and_does_not_stop_later_saves(disk: Path) -> None:
    with closing(AsyncWriter(disk)) as writer:
        writer.save(*job(1))
        message = fail(writer, job(2, size=LARGE))
        start = (
            f"the checkpoint of step 2 was not saved in {disk}: No space left on device ({disk}/.step-00000002.partial"
        )
        assert message.startswith(start)
        assert message.endswith(f"model.safetensors). The newest intact checkpoint is {disk}/step-00000001")
        assert {path.name for path in disk.iterdir()} == {"step-00000001"}
        writer.save(*job(3))
    assert complete_steps(disk) == [1, 3]
    assert same(Checkpoint(disk / "step-00000003").load("model"), components(3)[0].state)
    assert verify(disk / "step-00000001") == []


def test_a_read_only_disk_is_reported(disk: Path) -> None:
    with closing(AsyncWriter(disk)) as writer:
        writer.save(*job(1))
        writer.wait()
        mount("-o", "remount,ro", str(disk))
        message = fail(writer, job(2))
        mount("-o", "remount,rw", str(disk))
        assert f"was not saved in {disk}: Read-only file system ({disk}/.step-00000002.partial-" in message
        assert message.endswith(f"The newest intact checkpoint is {disk}/step-00000001")
        writer.save(*job(2))
    assert complete_steps(disk) == [1, 2]


def test_a_checkpoint_that_cannot_be_deleted_stops_neither_the_run_nor_its_next_start(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On NFS, for example, while another process of the host has one of its files open."""
    with closing(AsyncWriter(disk, retention=Retention(last=1))) as writer:
        writer.save(*job(1))
        writer.wait()
        inside = disk / "step-00000001" / "model.json"
        mount("--bind", str(inside), str(inside))
        writer.save(*job(2))
        writer.wait()
        assert f"step 2 was saved, but {disk}/step-00000001 could not be deleted: Device or resource bus" in caplog.text
        assert complete_steps(disk) == [2]
        writer.save(*job(3))
    (remains,) = (path for path in disk.iterdir() if ".deleted-" in path.name)
    caplog.clear()
    clean_up(disk)
    assert f"{remains} could not be removed: Device or resource busy" in caplog.text
    subprocess.run(["umount", "-l", str(remains / "model.json")], check=True)
    clean_up(disk)
    assert [path.name for path in disk.iterdir()] == ["step-00000003"]


def test_a_vanished_folder_is_reported_and_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with closing(AsyncWriter(root)) as writer:
        writer.save(*job(1))
        writer.wait()
        shutil.rmtree(root)
        message = fail(writer, job(2))
        assert f"step 2 was not saved in {root}: No such file or directory" in message
        assert message.endswith("There is no older one")
    assert not root.exists()


def test_a_file_where_the_folder_should_be_is_reported(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with closing(AsyncWriter(root)) as writer:
        root.rmdir()
        root.write_text("x")
        assert f"was not saved in {root}: Not a directory" in fail(writer, job(1))


def hidden(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.name.startswith(".")}


def not_finite(step: int) -> Job:
    return Manifest(step), [Component("model", {"weight": torch.tensor([torch.nan])}, must_be_finite=True)]


def test_the_part_of_a_worker_that_comes_late_to_a_failed_save_is_removed(tmp_path: Path) -> None:
    def part(step: int) -> Job:
        return Manifest(step), [Component("random", {"seed": step}, Pattern.PER_RANK)]

    with closing(AsyncWriter(tmp_path, world(0, 2))) as first, closing(AsyncWriter(tmp_path, world(1, 2))) as late:
        assert "inf or NaN" in fail(first, not_finite(5))
        assert hidden(tmp_path) == set()
        late.save(*part(5))
        assert settled(late).poll() is None
        assert hidden(tmp_path) == {".step-00000005.partial-01"}
        assert first.poll() is None  # as between any two steps
        assert hidden(tmp_path) == set()
        late.save(*part(6))
        first.save(*part(6))
        assert settled(first).poll() is None
        assert complete_steps(tmp_path) == [6]
        assert "inf or NaN" in fail(first, not_finite(7))
        late.save(*part(7))
        late.wait()
    assert hidden(tmp_path) == set()


def test_a_worker_without_room_to_say_why_it_failed_is_not_waited_for(disk: Path) -> None:
    """Only the second worker has something to write, and its part fills the disk."""
    large = {"noise": torch.zeros(LARGE * 4)}
    first, second = AsyncWriter(disk, world(0, 2), timeout_s=30.0), AsyncWriter(disk, world(1, 2))
    with closing(first), closing(second):
        first.save(Manifest(5), [Component("random", {"seed": 1}, Pattern.PER_RANK)])
        message = fail(second, (Manifest(5), [Component("random", large, Pattern.PER_RANK)]))
        assert "No space left on device" in message
        error = settled(first).poll()
    assert "rank 1 could not write its part: No space left on device" in str(error)
    assert hidden(disk) == set()
