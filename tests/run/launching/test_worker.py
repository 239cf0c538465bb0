"""What a launch and its workers hand each other is loaded only from a folder that is this user's own."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from paceline.run.launching import worker


def test_no_pickle_is_loaded_from_a_folder_that_others_can_enter(tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    folder.mkdir(mode=0o700)
    (folder / worker.CALL_FILE).write_bytes(pickle.dumps(("fn", (), {})))
    assert worker.load(folder / worker.CALL_FILE) == ("fn", (), {})
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match=r"call.pkl is not loaded: .*others have access to it, its mode is 0777"):
        worker.load(folder / worker.CALL_FILE)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(PermissionError, match="it is a symbolic link"):
        worker.load(tmp_path / "link" / worker.CALL_FILE)
