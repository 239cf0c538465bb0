"""What `paceline train` does when its run was stopped."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli.train import command
from paceline.observe.run_files import prepare_run_folder
from paceline.run.saving.stopping import Stopped


def test_nobody_needs_to_read_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C also ends what its output is piped to. The exit code must still tell that the run was saved."""
    reading, writing = os.pipe()
    os.close(reading)
    broken = io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True)

    def stop(*_: object) -> None:
        monkeypatch.setattr(sys, "stdout", broken)
        raise Stopped(3)

    monkeypatch.setattr(command, "show", lambda _: "")
    monkeypatch.setattr(command, "_launch", stop)
    project = SimpleNamespace(path=tmp_path / "p.yaml", folder=tmp_path)
    files = prepare_run_folder(tmp_path / "run")
    request: Any = SimpleNamespace(files=files, project=project, quiet=False, is_resumed=False)
    with broken, pytest.raises(Stopped):
        command._train(request, 1)
