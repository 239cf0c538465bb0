"""Parts of metrics files: exact and sampled, thinned, resumed, and still growing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.observe import curve_window, metrics
from paceline.observe.curve_window import Window, read_window
from paceline.observe.metrics import read_curves


def write(path: Path, *records: dict[str, Any]) -> Path:
    with path.open("a") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)
    return path


def lines(first: int, last: int, **values: Any) -> list[dict[str, Any]]:
    return [{"step": step, "time": step / 2, "loss": float(step), **values} for step in range(first, last + 1)]


def curve(window: Window, name: str) -> dict[int, float]:
    (found,) = [each for each in window.series if each.name == name]
    return dict(zip(found.steps.tolist(), found.values.tolist(), strict=True))


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of some kilobytes are treated like those of gigabytes."""
    monkeypatch.setattr(curve_window, "EXACT_BYTES", 2000)
    monkeypatch.setattr(curve_window, "TAIL_BYTES", 500)
    monkeypatch.setattr(curve_window, "SAMPLE_BYTES", 8000)


def test_a_short_file_is_read_exactly(tmp_path: Path) -> None:
    path = write(tmp_path / "m", *lines(1, 9, waiting=[0.5, 0.25]), {"step": 9, "eval": {"loss": 2.0}})
    window = read_window(path)
    assert (window.first_step, window.last_step, window.is_sampled) == (1, 9, False)
    assert window.names == ["time", "loss", "waiting/0", "waiting/1", "eval/loss"]
    assert window.offset == path.stat().st_size
    assert curve(window, "loss") == {step: float(step) for step in range(1, 10)}
    assert curve(window, "eval/loss") == {9: 2.0}


def test_names_select_metrics_and_groups_and_steps_select_a_range(tmp_path: Path) -> None:
    path = write(tmp_path / "m", *lines(1, 9, waiting=[0.5, 0.25], **{"a/b": 1.0, "__proto__": 3.0}))
    window = read_window(path, ["waiting", "a/b", "nothing"], 3, 4)
    assert [each.name for each in window.series] == ["waiting/0", "waiting/1", "a/b"]
    assert curve(window, "waiting/1") == {3: 0.25, 4: 0.25}
    assert "loss" in window.names
    assert curve(read_window(path, ["__proto__"], 9), "__proto__") == {9: 3.0}


def test_superseded_lines_are_left_out(tmp_path: Path) -> None:
    old = lines(1, 8)
    path = write(tmp_path / "m", *old, {"resumed_from": 4}, *lines(5, 6, loss=0.5))
    assert curve(read_window(path), "loss") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 0.5, 6: 0.5}
    assert curve(read_window(path, ["loss"], 4, 5), "loss") == {4: 4.0, 5: 0.5}
    assert read_window(path).last_step == 6
    assert "resumed_from" not in read_window(path).names


def test_a_partial_last_line_is_not_covered(tmp_path: Path) -> None:
    path = write(tmp_path / "m", *lines(1, 3))
    complete = path.stat().st_size
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    window = read_window(path)
    assert (window.offset, window.last_step) == (complete, 3)
    assert list(curve(window, "loss")) == [1, 2, 3]


def test_thinning_keeps_the_extremes(tmp_path: Path) -> None:
    records = lines(1, 400)
    records[200]["loss"], records[301]["loss"] = -7.0, 1e6
    window = read_window(write(tmp_path / "m", *records), ["loss"], points=20)
    found = curve(window, "loss")
    assert len(found) <= 20
    assert window.series[0].is_thinned
    assert (found[201], found[302], found[1], found[400]) == (-7.0, 1e6, 1.0, 400.0)


@pytest.mark.usefixtures("sampled")
def test_a_long_file_is_sampled_and_its_end_is_exact(tmp_path: Path) -> None:
    path = write(tmp_path / "m", *lines(1, 5000))
    window = read_window(path, ["loss"])
    found = curve(window, "loss")
    assert window.is_sampled
    assert (window.first_step, window.last_step) == (1, 5000)
    assert 50 < len(found) < 2000
    assert all(value == step for step, value in found.items())
    assert {1, 2, 3, 4998, 4999, 5000} <= set(found)
    assert max(np.diff(sorted(found))) < 200, "evenly spread"


@pytest.mark.usefixtures("sampled")
def test_a_range_of_a_long_file_is_exact(tmp_path: Path) -> None:
    path = write(tmp_path / "m", *lines(1, 5000))
    window = read_window(path, ["loss"], 2301, 2309)
    assert not window.is_sampled
    assert curve(window, "loss") == {step: float(step) for step in range(2301, 2310)}
    longer = read_window(path, ["loss"], 1000, 4000)
    assert longer.is_sampled
    assert all(1000 <= step <= 4000 for step in curve(longer, "loss"))
    whole = read_window(path, ["loss"], 1000, 4000, points=10_000, exact=True)
    assert list(curve(whole, "loss")) == list(range(1000, 4001))


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize(("first", "last"), [(0, 10_000), (1000, 1010), (2990, 3020), (3500, 3510), (2000, 3600)])
def test_superseded_lines_of_a_long_file(tmp_path: Path, first: int, last: int) -> None:
    path = tmp_path / "m"
    write(path, *lines(1, 4000), {"resumed_from": 3000}, *lines(3001, 3500, loss=-1.0), {"resumed_from": 3400})
    write(path, *lines(3401, 5000, loss=-2.0))
    steps, values = read_curves(path).series("loss")
    truth = dict(zip(steps.tolist(), values.tolist(), strict=True))
    for exact in (False, True):
        found = curve(read_window(path, ["loss"], first, last, points=20_000, exact=exact), "loss")
        assert found
        assert {step: value for step, value in found.items() if truth[step] != value} == {}
        if exact:
            assert found == {step: value for step, value in truth.items() if first <= step <= last}


@pytest.mark.usefixtures("sampled")
def test_rare_names_are_read_without_parsing_other_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m"
    for start in range(1, 3000, 100):
        write(path, *lines(start, start + 99), {"step": start + 99, "eval": {"loss": 0.5}})
    parsed = []
    original = metrics.LineReader.blocks

    def blocks(self: Any, containing: bytes = b"") -> Any:
        parsed.append(containing)
        return original(self, containing)

    monkeypatch.setattr(metrics.LineReader, "blocks", blocks)
    found = curve(read_window(path, ["eval/loss"], exact=True), "eval/loss")
    assert list(found) == list(range(100, 3001, 100))
    assert parsed[-1] == b'"eval'


def test_unreadable_lines_and_odd_values_do_no_harm(tmp_path: Path) -> None:
    path = write(tmp_path / "m", *lines(1, 3))
    with path.open("ab") as file:
        file.write(b'not json\n[1]\n{"step": -1, "loss": 1}\n{"step": "x"}\n\xff\xfe\n{"step": 4, "loss": "NaN"}\n')
    found = curve(read_window(path), "loss")
    assert list(found) == [1, 2, 3, 4]
    assert np.isnan(found[4])
    empty = tmp_path / "empty"
    empty.touch()
    assert read_window(empty) == Window()


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("resumed_at", range(1000, 1060, 8))
def test_a_resume_between_two_places_of_a_sample_is_seen(tmp_path: Path, resumed_at: int) -> None:
    """It drops fewer steps than lie between the places, so the steps of these are in order."""
    path = tmp_path / "m"
    write(path, *lines(1, resumed_at), {"resumed_from": resumed_at - 20}, *lines(resumed_at - 19, 4000, loss=-1.0))
    for last in range(resumed_at - 19, resumed_at + 1):
        window = read_window(path, ["loss"], last - 3, last, exact=True)
        truth = {step: float(step) if step <= resumed_at - 20 else -1.0 for step in range(last - 3, last + 1)}
        assert curve(window, "loss") == truth


@pytest.mark.usefixtures("sampled")
def test_the_last_step_of_a_run_that_was_just_resumed_from_far_back(tmp_path: Path) -> None:
    path = write(tmp_path / "m", *lines(1, 1000), {"resumed_from": 100})
    assert read_window(path, ["loss"]).last_step == 100
