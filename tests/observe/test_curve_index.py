"""Whole metrics files as thinned curves: what a sample of them misses, resumes, and files that grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.observe import curve_index
from paceline.observe.curve_index import CurveIndex


def write(path: Path, *records: Any) -> Path:
    with path.open("a") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)
    return path


def read(index: CurveIndex) -> dict[str, dict[int, float]]:
    for _ in index.read():
        pass
    return {name: dict(zip(each.steps, each.values, strict=True)) for name, each in index.curves().items()}


def test_extremes_of_a_long_file_are_kept(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0} for step in range(1, 100_001)]
    lines[61_803]["loss"], lines[31_415]["loss"] = 99.0, -7.0
    loss = read(CurveIndex(write(tmp_path / "m", *lines)))["loss"]
    assert len(loss) < 20_000
    assert {step: value for step, value in loss.items() if value != 1.0} == {61_804: 99.0, 31_416: -7.0}


def test_only_new_lines_are_read_and_a_resume_supersedes_old_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 3.0})
    index = CurveIndex(path)
    assert read(index) == {"loss": {1: 1.0, 2: 2.0, 3: 3.0}}
    path.write_bytes(b" " * 36 + path.read_bytes()[36:])  # would be unreadable, if it were read again
    write(path, {"resumed_from": 1}, {"step": 2, "loss": 5.0, "lr": 1})
    assert read(index) == {"loss": {1: 1.0, 2: 5.0}, "lr": {2: 1.0}}
    assert index.is_current
    path.rename(tmp_path / "other")
    assert not index.is_current
    write(path, {"step": 1})
    assert not index.is_current


def test_names_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_index, "MAX_NAMES", 2)
    assert list(read(CurveIndex(write(tmp_path / "m", {"step": 1, "a": 1.0, "b": 2.0, "c": 3.0})))) == ["a", "b"]
