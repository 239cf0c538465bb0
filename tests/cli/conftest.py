from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `runs` in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    return Path("runs")
