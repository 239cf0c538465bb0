"""Private folders in shared places: created for this user only, and checked before use."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from paceline.core.private_folder import private_folder, why_not_private

NOBODY = 65534


def test_new_folder_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        private_folder(folder := tmp_path / "own")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert why_not_private(folder) is None
    private_folder(folder)  # again: it is ours


def planted(path: Path, kind: str) -> None:
    if kind == "link":
        (path.parent / "target").mkdir(mode=0o700)
        path.symlink_to(path.parent / "target")
    elif kind == "dead link":
        path.symlink_to(path.parent / "nothing")
    elif kind == "file":
        path.write_text("")
    else:
        path.mkdir(mode=0o700)
        if kind == "open":
            path.chmod(0o750)
        else:
            os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("link", "it is a symbolic link"),
        ("dead link", "it is a symbolic link"),
        ("file", "it is not a folder"),
        ("open", "others have access to it, its mode is 0750"),
        pytest.param(
            "another user's",
            f"it belongs to user {NOBODY}",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away"),
        ),
    ],
)
def test_folder_that_is_not_private_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    path = tmp_path / "own"
    planted(path, kind)
    assert why_not_private(path) == reason
    with pytest.raises(PermissionError) as caught:
        private_folder(path)
    assert str(caught.value) == f"{path} is not a private folder of this user: {reason}; remove it"


def test_missing_folder_is_not_private(tmp_path: Path) -> None:
    assert why_not_private(tmp_path / "none") == "it does not exist"
    with pytest.raises(FileNotFoundError):
        private_folder(tmp_path / "none" / "own")
