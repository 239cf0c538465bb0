"""What looks like a checkpoint and cannot be used is named, never passed over in silence, and never deleted."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from resumable import run, setup
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.checkpoint.folders import complete_steps
from paceline.checkpoint.reader import verify


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, saved every two."""
    root = tmp_path_factory.mktemp("saved") / "run"
    run(root, 6, every_steps=2, keep_last=None)
    assert complete_steps(root) == [2, 4, 6]
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def behind_a_link(folder: Path) -> None:
    elsewhere = folder.parent.parent / f"elsewhere-{folder.name}"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)


def behind_a_dead_link(folder: Path) -> None:
    behind_a_link(folder)
    shutil.rmtree(folder.resolve())


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def shorter_name(folder: Path) -> None:
    folder.rename(folder.with_name(folder.name.replace("-0000000", "-")))


CASES = [
    (without_manifest, r"step-0000000\d has no manifest.json, so it is not complete: copy it again"),
    (behind_a_link, r"step-0000000\d is a symbolic link: replace it with the folder it points to"),
    (behind_a_dead_link, r"step-0000000\d is a symbolic link: replace it with the folder it points to"),
    (a_file, r"step-0000000\d is a file, not a folder"),
    (shorter_name, r"step-\d is not a checkpoint's name: rename it to step-0000000\d"),
]


def entries(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if "control" not in path.parts}


@pytest.mark.parametrize(("spoil", "reason"), CASES)
@pytest.mark.parametrize("resume", ["auto", True, None])
def test_a_fresh_start_beside_unusable_checkpoints_is_refused(
    root: Path, spoil: Callable[[Path], None], reason: str, resume: object
) -> None:
    for step in (2, 4, 6):
        spoil(root / f"step-0000000{step}")
    before = entries(root)
    with pytest.raises(pl.errors.CheckpointError, match=reason) as caught:
        setup(root, resume=resume)
    assert f"{root} has no usable checkpoint, but entries that look like one" in str(caught.value)
    assert "move them out of the folder" in str(caught.value)
    assert entries(root) == before


@pytest.mark.parametrize(("spoil", "reason"), CASES)
def test_an_unusable_one_beside_a_usable_one_is_a_warning_and_is_kept(
    root: Path, spoil: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(root / "step-00000006")
    names = {path.name for path in root.iterdir()} - {"step-00000002", "step-00000004"}
    with caplog.at_level(logging.WARNING, "paceline"), setup(root, skip=["average"]) as trainer:
        assert trainer.resumed_from == root / "step-00000004"
    assert re.search(f"not used: {re.escape(str(root))}/{reason}", caplog.text)
    assert names <= {path.name for path in root.iterdir()}


@pytest.mark.parametrize("spoil", [without_manifest, behind_a_link, behind_a_dead_link, a_file])
def test_a_save_of_the_same_step_moves_it_aside(
    root: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(root / "step-00000006")
    contents = entries(root / "step-00000006")
    run(root, 6)
    assert verify(root / "step-00000006") == []
    aside = root / "set-aside-1" / "step-00000006"
    assert aside.is_symlink() or aside.exists()
    assert entries(aside) == contents
    assert f"is not a usable checkpoint and was moved to {aside.parent}: " in caplog.text


def test_a_renamed_checkpoint_is_named_and_not_moved_while_in_use(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "step-00000004").rename(root / "step-00000050")
    message = rf"{root}/step-00000050 is named for step 50, but its manifest says step 4: rename it to step-00000004"
    with setup(root, skip=["average"]) as trainer:
        assert trainer.resumed_from == root / "step-00000006"
    assert message in caplog.text
    shutil.rmtree(root / "step-00000006")
    shutil.rmtree(root / "step-00000002")
    kept = next(root.glob("**/step-00000050"))
    kept.rename(root / "step-00000050")
    with pytest.raises(pl.errors.CheckpointError, match=message):
        setup(root, skip=["average"])
    with pytest.raises(pl.errors.CheckpointError, match=message):
        setup(root.parent / "other", skip=["average"], resume=root / "step-00000050")
    (root / "step-00000050").rename(root / "step-00000004")
    assert run(root, 6) == run(None, 6)


@pytest.mark.parametrize("num_workers", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_all_workers_refuse_together(root: Path, pool: WorkerPool, num_workers: int) -> None:
    for step in (2, 4, 6):
        without_manifest(root / f"step-0000000{step}")

    def main() -> None:
        setup(root)

    with pytest.raises(WorkersFailed) as caught:
        pool.run(main, num_workers)
    assert set(caught.value.errors) == set(range(num_workers))
    assert all("has no manifest.json" in str(error) for error in caught.value.errors.values())


@pytest.mark.parametrize("what", ["resume", "init_from"])
def test_a_folder_given_by_name_says_what_is_wrong_with_what_is_in_it(root: Path, what: str) -> None:
    for step in (2, 4, 6):
        without_manifest(root / f"step-0000000{step}")
    with pytest.raises(pl.errors.CheckpointError, match=r"has no usable checkpoint: .*step-00000006 has no manifest"):
        setup(root.parent / "other", **{what: root})


def test_a_linked_checkpoint_can_be_named(root: Path) -> None:
    for step in (2, 4, 6):
        behind_a_link(root / f"step-0000000{step}")
    assert run(root, 9, resume=root / "step-00000006") == run(None, 9)
    assert (root / "step-00000006").is_symlink()
    assert complete_steps(root) == [9]
