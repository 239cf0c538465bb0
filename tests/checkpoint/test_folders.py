"""Which folders are checkpoints, which one is the latest, and what is cleaned up."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoint_state import save_steps

from paceline.checkpoint.folders import (
    clean_up,
    complete_steps,
    delete,
    latest,
    make_visible,
    partial_folder,
    step_folder,
)
from paceline.checkpoint.reader import verify


def test_latest_is_the_highest_complete_step(tmp_path: Path) -> None:
    assert complete_steps(tmp_path / "gone") == []
    assert latest(tmp_path) is None
    save_steps(tmp_path, 30, 4, 100_000_000, 9)
    assert complete_steps(tmp_path) == [4, 9, 30, 100_000_000]
    assert latest(tmp_path) == tmp_path / "step-100000000"


def test_only_the_final_name_and_a_manifest_make_a_checkpoint(tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 3)
    shutil.copytree(folder, tmp_path / ".step-00000004.partial-12ab")
    shutil.copytree(folder, tmp_path / "step-5")
    shutil.copytree(folder, tmp_path / "step-00000006.bak")
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-00000008").write_text("x")
    (tmp_path / "step-00000009").symlink_to(folder)
    assert complete_steps(tmp_path) == [3]


def test_clean_up_removes_what_was_interrupted_and_nothing_else(tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 3)
    partial, deleted = tmp_path / ".step-00000004.partial-12ab", tmp_path / ".step-00000002.deleted-12ab"
    replaced = tmp_path / ".step-00000003.replaced-12ab"
    for hidden in (partial, deleted, replaced):
        shutil.copytree(folder, hidden)
    others = [tmp_path / name for name in ("notes.txt", ".step-4.partial-x", "partial", ".lock")]
    for other in others:
        other.write_text("x")
    link = tmp_path / ".step-00000005.partial-12ab"
    link.symlink_to(folder)
    clean_up(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, link.name, *(other.name for other in others)}
    assert verify(folder) == []
    clean_up(tmp_path / "gone")


def test_clean_up_puts_back_a_checkpoint_whose_replacement_never_came(tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 3)
    folder.rename(tmp_path / ".step-00000003.replaced-12ab")
    assert latest(tmp_path) is None
    clean_up(tmp_path)
    assert latest(tmp_path) == folder
    assert list(tmp_path.iterdir()) == [folder]


def test_a_failed_rename_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    (folder,) = save_steps(tmp_path, 3)
    with pytest.raises(FileNotFoundError):
        make_visible(partial_folder(tmp_path, 3, "12ab"), step_folder(tmp_path, 3))
    assert verify(folder) == []


def test_delete_takes_a_checkpoint_away(tmp_path: Path) -> None:
    save_steps(tmp_path, 3, 4)
    delete(tmp_path / "step-00000003")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_a_replaced_checkpoint_that_was_deleted_in_part_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = save_steps(tmp_path, 3)
    partial = partial_folder(tmp_path, 3, "12ab")
    shutil.copytree(folder, partial)
    with monkeypatch.context() as patch:  # killed while it deletes
        patch.setattr("shutil.rmtree", lambda path, **_: (path / "model.json").unlink())
        make_visible(partial, folder)
    assert verify(folder) == []
    shutil.rmtree(folder)
    clean_up(tmp_path)
    assert list(tmp_path.iterdir()) == []
