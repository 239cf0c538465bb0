"""A disk that fails under a run: the run goes on or stops, as chosen, and what was saved before stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from resumable import NUM_STEPS, setup, step
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.checkpoint.errors import ReplicationError
from paceline.checkpoint.folders import complete_steps
from paceline.checkpoint.reader import verify

BREAKS_AT = 7  # after checkpoints of steps 3 and 6


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a small disk needs root: {done.stderr.strip()}")


def train(root: Path, on_error: str, breaks: Callable[[], None], repairs: Callable[[], None] | None = None) -> int:
    """Save every 3 steps, all of them kept; the step at which the run ended."""
    with setup(root, every_steps=3, keep_last=None, on_error=on_error) as trainer:

        def break_it(record: pl.StepRecord) -> None:
            if record.step == BREAKS_AT:
                while not (root / "step-00000006").exists():  # it is being written beside the training
                    time.sleep(0.001)
                trainer.evaluate([0.0], lambda *_: 0.0)  # all workers have seen it
                if trainer.is_main:
                    breaks()

        trainer.every(BREAKS_AT, break_it)
        if repairs is not None:
            trainer.every(13, lambda record: repairs() if record.step == 13 else None)
        for epoch in trainer.epochs(2):
            for batch in epoch:
                step(trainer, batch)
        return trainer.position.step


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            return


def check_intact(root: Path, steps: list[int]) -> None:
    assert complete_steps(root) == steps
    assert [verify(root / f"step-{number:08d}") for number in steps] == [[]] * len(steps)


def test_a_full_disk_stops_the_run_with_path_cause_and_what_is_intact(disk: Path) -> None:
    with pytest.raises(pl.errors.CheckpointError) as caught:
        train(disk / "run", "stop", lambda: fill(disk))
    message = str(caught.value)
    assert message.startswith(
        f"the checkpoint of step 9 was not saved in {disk}/run: No space left on device ({disk}/run"
    )
    assert message.endswith(f"The newest intact checkpoint is {disk}/run/step-00000006")
    check_intact(disk / "run", [3, 6])


def test_a_full_disk_is_a_warning_where_chosen_and_later_saves_succeed(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert train(disk / "run", "continue", lambda: fill(disk), (disk / "filler").unlink) == NUM_STEPS
    check_intact(disk / "run", [3, 6, 15, 18, 21, 22])
    warnings = [record.getMessage() for record in caplog.records if "continues without" in record.getMessage()]
    assert len(warnings) == 2
    assert f"step 9 was not saved in {disk}/run: No space left on device" in warnings[0]
    assert warnings[0].endswith(f"The newest intact checkpoint is {disk}/run/step-00000006")


@pytest.mark.parametrize("on_error", ["continue", "stop"])
@pytest.mark.parametrize("num_workers", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_failed_saves_leave_no_partial_folders(disk: Path, pool: WorkerPool, num_workers: int, on_error: str) -> None:
    def main() -> int:
        return train(disk / "run", on_error, lambda: fill(disk))

    if on_error == "continue":
        assert pool.run(main, num_workers) == [NUM_STEPS] * num_workers
    else:
        with pytest.raises(WorkersFailed):
            pool.run(main, num_workers)
    check_intact(disk / "run", [3, 6])
    assert {path.name for path in (disk / "run").iterdir() if path.name.startswith(".step-")} == set()


def test_a_full_disk_does_not_end_a_restarted_run(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which notes where it was restarted, to find out whether restarts gain anything."""
    train(disk / "run", "continue", lambda: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    fill(disk)
    with setup(disk / "run", on_error="continue") as trainer:
        assert trainer.position.step == NUM_STEPS


def test_a_last_save_that_failed_is_tried_again_when_the_run_ends(disk: Path) -> None:
    with setup(disk / "run", every_steps=11, on_error="continue") as trainer:
        for batch in next(trainer.epochs(1)):
            step(trainer, batch)
        fill(disk)
        trainer.save()
        while trainer.run.checkpointer._writers[0].is_busy:
            time.sleep(0.001)
        assert complete_steps(disk / "run") == []
        (disk / "filler").unlink()
    check_intact(disk / "run", [11])


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_disk_that_becomes_read_only(disk: Path, on_error: str, caplog: pytest.LogCaptureFixture) -> None:
    def breaks() -> None:
        # A mount of its own over the folder: the disk itself cannot become read-only while the run's lock is open.
        mount("--bind", str(disk / "run"), str(disk / "run"))
        mount("-o", "remount,bind,ro", str(disk / "run"))

    if on_error == "stop":
        with pytest.raises(
            pl.errors.CheckpointError, match=rf"step 9 was not saved in {disk}/run: Read-only file system"
        ):
            train(disk / "run", on_error, breaks)
    else:
        assert train(disk / "run", on_error, breaks) == NUM_STEPS
        assert f"not saved in {disk}/run: Read-only file system" in caplog.text
    check_intact(disk / "run", [3, 6])


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_folder_that_vanishes(tmp_path: Path, on_error: str, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    if on_error == "stop":
        with pytest.raises(
            pl.errors.CheckpointError, match=rf"step 9 was not saved in {root}: No such file .* no older one"
        ):
            train(root, on_error, lambda: shutil.rmtree(root))
    else:
        assert train(root, on_error, lambda: shutil.rmtree(root)) == NUM_STEPS
        assert f"not saved in {root}: No such file or directory" in caplog.text
    assert not root.exists()


def test_a_folder_that_cannot_be_made_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, cause in ((tmp_path / "file" / "run", "Not a directory"), (Path("/proc/x"), "No such file")):
        message = f"checkpoints cannot be saved in {folder}: {cause}.*; choose a folder that this user can write to"
        with pytest.raises(pl.errors.CheckpointError, match=message):
            setup(folder)


def read_only(folder: Path) -> None:
    mount("--bind", str(folder), str(folder))
    mount("-o", "remount,bind,ro", str(folder))


@pytest.mark.parametrize("num_workers", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_fresh_start_in_a_read_only_folder(disk: Path, pool: WorkerPool, num_workers: int) -> None:
    def main() -> None:
        setup(disk / "run")

    (disk / "run").mkdir()
    read_only(disk / "run")
    try:
        with pytest.raises(WorkersFailed) as caught:
            pool.run(main, num_workers)
    finally:
        subprocess.run(["umount", "-l", str(disk / "run")], check=True)
    assert set(caught.value.errors) == set(range(num_workers))
    for error in caught.value.errors.values():
        assert f"checkpoints cannot be saved in {disk}/run: Read-only file system" in str(error)
        assert "choose a folder that this user can write to" in str(error)


@pytest.mark.parametrize("num_workers", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_folder_whose_name_is_not_utf_8(tmp_path: Path, pool: WorkerPool, num_workers: int) -> None:
    root = tmp_path / os.fsdecode(b"caf\xe9")

    def main() -> str | None:
        with setup(root, every_steps=2, snapshot_every=3) as trainer:
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    step(trainer, batch)
            return str(trainer.resumed_from)

    assert pool.run(main, num_workers) == ["None"] * num_workers
    assert pool.run(main, num_workers) == [str(root / "step-00000011")] * num_workers
    for path in root.glob("step-*/manifest.json"):
        path.unlink()
    with pytest.raises(WorkersFailed, match=r"has no manifest\.json"):
        pool.run(main, num_workers)


def test_a_disk_that_fails_on_two_workers_stops_both(tmp_path: Path, pool: WorkerPool) -> None:
    root = tmp_path / "run"

    def main() -> None:
        train(root, "stop", lambda: shutil.rmtree(root))

    with pytest.raises(WorkersFailed) as caught:
        pool.run(main, 2)
    errors = caught.value.errors
    assert set(errors) == {0, 1}
    # Who writes last learns of it last, and may find that the other has left.
    reasons = [error for error in errors.values() if isinstance(error, pl.errors.CheckpointError)]
    assert reasons
    others = [str(error) for error in errors.values() if error not in reasons]
    assert all("closed its communicator before" in other for other in others), others


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    message = r"'8.bias' of component 'model' contains inf or NaN"
    with (
        pytest.raises(pl.errors.CheckpointError, match=message),
        setup(tmp_path, every_steps=1, final=False) as trainer,
    ):
        trainer.every(2, lambda _: trainer.model[8].bias.data.fill_(float("nan")))
        for batch in next(trainer.epochs(1)):
            if trainer.position.step == 2:
                break
            step(trainer, batch)
        trainer.save()
    assert complete_steps(tmp_path) == [1]


@pytest.mark.parametrize("level", ["quick", "tensor", "full", {"model": "quick", "optimizer": "full"}])
def test_replicas_that_differ_are_found_before_they_are_saved(tmp_path: Path, pool: WorkerPool, level: Any) -> None:
    def main() -> None:
        with setup(tmp_path, every_steps=3, check_replicas=level) as trainer:
            if trainer.world.rank == 1:
                trainer.every(6, lambda _: trainer.optimizer.state[trainer.model[0].weight]["exp_avg"].add_(1e-3))
            for batch in next(trainer.epochs(1)):
                step(trainer, batch)

    with pytest.raises(WorkersFailed) as caught:
        pool.run(main, 2)
    for error in caught.value.errors.values():
        assert isinstance(error, ReplicationError)
        assert "optimizer must be the same on every worker, but differs from rank 0's: on rank 1" in str(error)
        assert "state.0.exp_avg" in str(error)
    assert len(caught.value.errors) == 2
    assert complete_steps(tmp_path) == [3]


def test_only_the_named_components_are_compared(tmp_path: Path, pool: WorkerPool) -> None:
    def main() -> None:
        with setup(tmp_path, every_steps=3, check_replicas={"model": "full"}) as trainer:
            if trainer.world.rank == 1:
                trainer.every(6, lambda _: trainer.optimizer.state[trainer.model[0].weight]["exp_avg"].add_(1e-9))
            for batch in next(trainer.epochs(1, max_steps=6)):
                step(trainer, batch)

    pool.run(main, 2)
    assert complete_steps(tmp_path)[-1] == 6


def test_a_component_that_is_not_replicated_cannot_be_compared(tmp_path: Path) -> None:
    message = r"check_replicas\['optimiser'\]: this run has no such component .* choose from model, optimizer"
    with pytest.raises(ValueError, match=message), setup(tmp_path, check_replicas={"optimiser": "full"}) as trainer:
        trainer.save()
