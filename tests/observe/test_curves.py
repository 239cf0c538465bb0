"""Metrics as curves: what reading all rows would give, in memory that does not depend on the length of the file."""

from __future__ import annotations

import json
import math
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.logs.panels import moving_mean
from paceline.observe import curves, json_lines
from paceline.observe.curves import read_curves
from paceline.observe.json_lines import to_json
from paceline.observe.metrics import MetricsWriter, flat_items, read_metrics
from paceline.observe.run_files import RunFiles
from paceline.observe.summary import summarize, text

LINE = (
    '{"step":%d,"time":%.3f,"epoch":0,"loss":%.6f,"lr":0.001,"grad_norm":0.8,"samples_per_s":812.5,'
    '"shares":[6,2],"waiting":[0.01,0.04]}\n'
)

names = st.sampled_from(["loss", "lr", "eval", "shares", "odd"])
numbers = st.one_of(
    st.floats(allow_nan=True), st.integers(-(2**64), 2**64), st.booleans(), st.none(), st.text(max_size=3)
)
values = st.recursive(numbers, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=2))
lines = st.one_of(
    st.fixed_dictionaries(
        {"step": st.integers(0, 9)}, optional=dict.fromkeys(["loss", "eval", "shares", "odd"], values)
    ),
    st.fixed_dictionaries({"resumed_from": st.integers(0, 9)}),
    values,
)


@given(st.lists(lines, max_size=12), st.integers(20, 200))
def test_curves_are_what_reading_all_rows_gives(found: list[Any], block_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        path.write_text("".join(f"{to_json(line)}\n" for line in found), errors="backslashreplace")
        whole = read_metrics(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_lines, "_READ_BYTES", block_bytes)
            read = read_curves(path)
    assert read.num_unreadable == whole.num_unreadable
    assert read.last_step == whole.last_step
    steps = [line["step"] for line in found if isinstance(line, dict) and "step" in line]
    if len(set(steps)) == len(steps):  # of several lines of a step, rows count the newer value, curves the newer number
        expected: dict[str, list[tuple[int, float]]] = {}
        for row in whole.rows:
            for name, number in flat_items(row):
                expected.setdefault(name, []).append((row["step"], number))
        expected.pop("step", None)
        assert {name for name in read.names() if len(read.series(name)[0])} == set(expected)
        for name, points in expected.items():
            np.testing.assert_array_equal(np.transpose(read.series(name)), np.array(points, np.float64))


def test_a_long_curve_keeps_its_extremes_and_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MAX_POINTS", 64)
    monkeypatch.setattr(curves, "_BUFFER_POINTS", 256)
    path = tmp_path / "metrics.jsonl"
    losses = [2 + math.sin(step / 50) for step in range(1, 5001)]
    losses[3210], losses[77] = 99.0, -5.0
    losses[1000] = math.nan
    path.write_text("".join(f"{to_json({'step': i, 'loss': loss})}\n" for i, loss in enumerate(losses, 1)))
    read = read_curves(path)
    steps, numbers_ = read.series("loss")
    assert len(steps) <= 64 * 2
    assert (steps[0], steps[-1], numbers_[-1]) == (1, 5000, losses[-1])
    assert steps[np.nanargmax(numbers_)] == 3211
    assert steps[np.nanargmin(numbers_)] == 78
    assert read.mean("loss") == pytest.approx(np.nanmean(losses))
    # Without a choice of points: smoothing needs all of them.
    assert len(read_curves(path, is_whole=lambda _: True).series("loss")[0]) == 5000


def test_the_memory_and_time_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plainest reader there is: a loop of json.loads. Memory does not grow with the file."""
    monkeypatch.setattr(curves, "MAX_POINTS", 1024)
    monkeypatch.setattr(curves, "_BUFFER_POINTS", 4096)
    peaks = {}
    for count in (15_000, 60_000):
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(LINE % (step, step * 0.5, 2 + step % 97 / 97) for step in range(1, count + 1)))
        tracemalloc.start()
        summarize_file(path)
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[60_000] < 1.5 * peaks[15_000]
    assert peaks[60_000] < 100e6
    ratios = []
    for _ in range(3):  # the machine may be busy: the best of three
        start = time.process_time()
        summarize_file(path)
        ours = time.process_time() - start
        start = time.process_time()
        with path.open() as file:
            for line in file:
                json.loads(line)
        ratios.append(ours / (time.process_time() - start))
    assert min(ratios) < 4


def summarize_file(path: Path) -> None:
    folder = path.parent / path.stem
    folder.mkdir(exist_ok=True)
    link = folder / "metrics.jsonl"
    if not link.exists():
        link.symlink_to(path)
    assert summarize(RunFiles(folder)).step == int(path.stem)


def test_a_line_without_an_end_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_READ_BYTES", 64)
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 256)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"loss":1}\n' + "x" * 5000 + '\n{"step":2,"loss":2}\n')
    read = read_curves(path)
    assert read.series("loss")[0].tolist() == [1, 2]
    assert read.num_unreadable == 1


@pytest.mark.parametrize("loss", [1e308, -1e308, 1.7e308, 5e-324])
def test_a_summary_of_numbers_at_the_end_of_their_range(loss: float, tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 101):
            values = {"step": step, "loss": loss if step % 2 else -loss, "samples_per_s": 1e308, "time": 1e308}
            print(json.dumps(values), file=file)
    (tmp_path / "status.json").write_text(
        '{"state": "finished", "pid": 1, "process_started": null, "host": "h", "started": 1e300, "num_starts": 1,'
        ' "total_steps": 3, "ended": 1e300, "reason": null}'
    )
    summary = summarize(RunFiles(tmp_path))
    assert summary.samples_per_s == pytest.approx(1e308)
    assert summary.train_loss is not None
    assert summary.train_loss.highest == abs(loss)
    assert max(map(len, text(summary).splitlines())) < 200


def test_the_clock_goes_on_without_reading_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"time":5}\n{"step":9,"time":50}\n{"resumed_from":1}\n{"step":3,"time":7}\n')
    writer = MetricsWriter(path, start_step=4)
    writer.log(5, {})
    writer.close()
    assert 7 <= read_metrics(path).rows[-1]["time"] < 50


@pytest.mark.parametrize("window", [2, 3, 7, 50, 1000, 10**9])
def test_a_moving_mean_over_any_window(window: int) -> None:
    rng = np.random.default_rng(window)
    series = rng.normal(size=333)
    series[[7, 100]] = np.nan
    reach = min(window // 2, len(series) - 1)
    for i, mean in enumerate(moving_mean(series, window)):
        own = series[: 2 * i + 1] if i < reach else series[i - reach : i + reach + 1]
        assert mean == pytest.approx(np.nanmean(own), abs=1e-12)


def test_a_moving_mean_of_large_numbers() -> None:
    assert moving_mean(np.full(1000, 1.5e308), 100) == pytest.approx(np.full(1000, 1.5e308))
