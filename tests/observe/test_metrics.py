"""metrics.jsonl: writing, reading in bounded memory, resuming, and what remains after a kill."""

from __future__ import annotations

import json
import math
import tempfile
import tracemalloc
from itertools import count
from multiprocessing import get_context
from multiprocessing.synchronize import Event as Event_
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe import json_lines
from paceline.observe import metrics as metrics_module
from paceline.observe.json_lines import to_json
from paceline.observe.metrics import CountedLines, MetricsWriter, columns_of, flat_items, read_curves
from paceline.observe.run_files import RunFiles
from paceline.observe.summary import summarize


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(metrics_module, "monotonic", lambda: self.now_s)


def write(path: Path, *steps: int, start_step: int = 0, loss: float = 1.0) -> None:
    writer = MetricsWriter(path, start_step)
    for step in steps:
        writer.log(step, {"loss": loss})
    writer.close()


def losses(path: Path) -> dict[int, float]:
    steps, values = read_curves(path).series("loss")
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


def test_a_line_holds_step_time_and_values(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    writer = MetricsWriter(path)
    clock.now_s += 2.5
    values = {"epoch": 0, "loss": torch.tensor(2.5), "lr": np.float32(0.5), "shares": (6, 2), "eval": {"loss": 2}}
    writer.log(40, values)
    assert path.read_text() == (
        '{"step":40,"time":2.5,"epoch":0,"loss":2.5,"lr":0.5,"shares":[6,2],"eval":{"loss":2}}\n'
    )
    metrics = read_curves(path)
    assert metrics.names() == ["time", "epoch", "loss", "lr", "shares/0", "shares/1", "eval/loss"]
    assert [metrics.last(name) for name in ("shares/1", "eval/loss", "shares/2", "step/x")] == [2, 2, None, None]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_text_to_json_and_numbers_to_us(path: Path, value: float) -> None:
    MetricsWriter(path).log(1, {"loss": value, "waiting": [0.5, value], "eval": {"loss": torch.tensor(value)}})

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    strict = json.loads(path.read_text(), parse_constant=refuse)
    assert strict["loss"] in ("NaN", "Infinity", "-Infinity")
    metrics = read_curves(path)
    for name in ("loss", "waiting/1", "eval/loss"):
        np.testing.assert_equal(metrics.last(name), value)
    assert metrics.last("waiting/0") == 0.5


def test_lines_of_one_step_add_up_and_the_newer_counts(path: Path) -> None:
    writer = MetricsWriter(path)
    writer.log(5, {"loss": 1.0, "eval": {"loss": 3.0, "accuracy": 0.5}})
    writer.log(5, {"loss": 2.0, "eval": {"loss": 4.0}})
    metrics = read_curves(path)
    assert [metrics.series(name)[1].tolist() for name in ("loss", "eval/loss", "eval/accuracy")] == [[2], [4], [0.5]]


def test_a_run_that_goes_on_supersedes_later_steps(path: Path) -> None:
    write(path, 10, 20, 30, loss=1.0)
    write(path, 25, 35, start_step=20, loss=2.0)
    assert losses(path) == {10: 1.0, 20: 1.0, 25: 2.0, 35: 2.0}
    write(path, start_step=0)  # begun anew: nothing of before counts
    assert losses(path) == {}


def test_the_clock_leaves_out_the_time_between_stop_and_resumption(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    writer = MetricsWriter(path)
    for step in (10, 20):
        clock.now_s += 7.0
        writer.log(step, {})
    clock.now_s += 1000.0
    writer = MetricsWriter(path, start_step=10)
    clock.now_s += 5.0
    writer.log(20, {})
    assert read_curves(path).series("time")[1].tolist() == [7.0, 12.0]


def test_a_torn_last_line_is_passed_over_and_cut_off_by_the_next_writer(path: Path) -> None:
    write(path, 1, 2)
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[1])):
        path.write_bytes(whole[:-cut])
        assert losses(path) == {1: 1.0}
        assert read_curves(path).num_unreadable == 0
        write(path, 2, start_step=1, loss=5.0)
        assert losses(path) == {1: 1.0, 2: 5.0}
        assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    "strange",
    [
        b"not json",
        b"",
        b"[1, 2]",
        b'"text"',
        b'{"loss": 1}',
        b'{"step": "7"}',
        b'{"step": -1}',
        b'{"step": true}',
        b'{"step": 1e400}',
        b'{"step": 99999999999999999999999}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"step": 2, "loss": ' + b"9" * 5000 + b"}",
        b'{"step":2',  # this and the next would be one object, with a comma between them
    ],
)
def test_lines_of_other_kinds_are_counted_and_left_out(path: Path, strange: bytes) -> None:
    path.write_bytes(b'{"step": 1, "loss": 0.5}\n' + strange + b'\n{"step": 3, "loss": 0.25}\n')
    metrics = read_curves(path)
    assert metrics.series("loss")[0].tolist() == [1, 3]
    assert metrics.num_unreadable == 1


def test_two_halves_of_an_object_do_not_become_one(path: Path) -> None:
    path.write_bytes(b'{"step":1\n"loss":2}\n')
    metrics = read_curves(path)
    assert (metrics.num_lines, metrics.num_unreadable) == (0, 2)


def test_values_that_are_no_numbers_are_no_series(path: Path) -> None:
    path.write_text('{"step":1,"loss":null,"lr":true,"x":"y","big":' + "9" * 400 + ',"deep":{"a":{"b":1}}}\n')
    metrics = read_curves(path)
    assert metrics.names() == ["deep/a/b"]
    assert metrics.series("deep/a/b")[1].tolist() == [1.0]
    assert not len(metrics.series("loss")[0])


def test_the_end_of_a_long_file_is_read_without_the_rest(path: Path) -> None:
    write(path, *range(1, 3001))
    newest = read_curves(path, tail=True)
    assert newest.last_step == 3000
    assert newest.last("loss") == 1.0
    assert newest.num_lines < 3000


def write_for_ever(path: Path, up: Event_) -> None:
    writer = MetricsWriter(path)
    for step in count(1):
        writer.log(step, {"loss": 1.0 / step, "shares": [6, 2]})
        if step == 50:
            up.set()


def test_a_file_that_another_process_writes_is_read_meanwhile_and_after_a_kill(path: Path) -> None:
    context = get_context("fork")  # a fresh interpreter would import torch first
    up = context.Event()
    writer = context.Process(target=write_for_ever, args=(path, up))
    writer.start()
    try:
        assert up.wait(30)
        seen = [read_curves(path).last_step for _ in range(3)]
        assert seen[0] >= 50
        assert seen == sorted(seen)
    finally:
        writer.kill()
        writer.join()
    metrics = read_curves(path)
    assert metrics.series("loss")[0].tolist() == list(range(1, metrics.num_lines + 1))
    assert metrics.num_unreadable == 0
    at = metrics.last_step
    write(path, at + 1, start_step=at)
    assert read_curves(path).last_step == at + 1


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


def plain_reader(found: list[Any]) -> tuple[dict[str, dict[int, float]], int]:
    """The expected numbers by name and step, and the number of unreadable lines."""
    numbers: dict[str, dict[int, float]] = {}
    num_unreadable = 0
    for line in found:
        step = line.get("step", line.get("resumed_from")) if isinstance(line, dict) else None
        if type(step) is not int:
            num_unreadable += 1
        elif "step" not in line:
            numbers = {name: {s: v for s, v in points.items() if s <= step} for name, points in numbers.items()}
        else:
            for name, number in flat_items(line):
                numbers.setdefault(name, {})[step] = number
    return numbers, num_unreadable


@given(st.lists(lines, max_size=12), st.integers(20, 200))
def test_curves_are_those_of_a_plain_reader(found: list[Any], block_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        path.write_text("".join(f"{to_json(line)}\n" for line in found), errors="backslashreplace")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_lines, "_READ_BYTES", block_bytes)
            read = read_curves(path)
        restored = json_lines.parse_lines(path.read_bytes().split(b"\n")[:-1])
    expected, num_unreadable = plain_reader(restored)
    assert read.num_unreadable == num_unreadable
    steps = expected.pop("step", {})
    assert read.last_step == max(steps, default=0)
    assert {name for name in read.names() if len(read.series(name)[0])} == {
        n for n, points in expected.items() if points
    }
    for name, points in expected.items():
        np.testing.assert_array_equal(np.transpose(read.series(name)), np.array(sorted(points.items())).reshape(-1, 2))


def test_a_long_curve_keeps_its_extremes_and_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_POINTS", 64)
    monkeypatch.setattr(metrics_module, "_BUFFER_POINTS", 256)
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
    assert len(read_curves(path, is_whole=True).series("loss")[0]) == 5000


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_POINTS", 128)
    monkeypatch.setattr(metrics_module, "_BUFFER_POINTS", 512)
    monkeypatch.setattr(json_lines, "_READ_BYTES", 1 << 15)
    peaks = {}
    for num_lines in (1_500, 6_000):
        path = tmp_path / f"{num_lines}.jsonl"
        path.write_text("".join(LINE % (step, step * 0.5, 2 + step % 97 / 97) for step in range(1, num_lines + 1)))
        tracemalloc.start()
        summarize_file(path)
        peaks[num_lines] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[6_000] < 1.5 * peaks[1_500]


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


def test_the_clock_goes_on_without_reading_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"time":5}\n{"step":9,"time":50}\n{"resumed_from":1}\n{"step":3,"time":7}\n')
    writer = MetricsWriter(path, start_step=4)
    writer.log(5, {})
    writer.close()
    assert 7 <= read_curves(path).series("time")[1][-1] < 50


@pytest.mark.parametrize(
    "record",
    [
        {"loss": 1.5, "epoch": 3, "lr": 1e-3},
        {"shares": [6, 2], "waiting": [0.5, 0.25], "empty": [], "nothing": None, "text": "a"},
        {"eval": {"loss": 2.0, "deep": {"er": [1.0, {"x": 2}]}}, "flag": True},
        {"huge": 1 << 70, "mixed": [1.0, "a"]},
    ],
)
def test_columns_are_what_flat_items_has(record: dict[str, Any]) -> None:
    odd = {"loss": None, "shares": [1], "eval": {"other": 1}}
    lines = [{"step": step, **(odd if step == 4 else record)} for step in range(1, 8)]
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, number in flat_items({key: value for key, value in line.items() if key != "step"}):
            expected.setdefault(name, []).append((line["step"], number))
    assert {name: list(zip(*found, strict=True)) for name, found in columns_of(lines).items()} == expected


def test_a_long_run_goes_on_without_reading_its_whole_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"step": step, "time": step / 2, "samples": 8 * step} for step in range(1, 5001)]
    superseded = [{"step": step, "time": 9e9, "samples": 1 << 40} for step in range(4991, 5101)]
    records = [*lines, *superseded, {"resumed_from": 4990}, {"step": 4995, "time": 2500.0, "eval": {"loss": 1}}]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    parsed: list[bytes] = []
    original = json_lines.parse_lines

    def parse_lines(lines: Any) -> list[Any]:
        parsed.extend(lines)
        return original(lines)

    monkeypatch.setattr(json_lines, "parse_lines", parse_lines)
    monkeypatch.setattr(json_lines, "_READ_BYTES", 1000)
    Clock(monkeypatch)
    writer = MetricsWriter(path, start_step=4995)
    writer.log(4996, {"loss": 1.0}, num_samples=8)
    assert len(parsed) < 400
    assert json.loads(path.read_bytes().splitlines()[-1]) == {
        "step": 4996,
        "time": 2500.0,
        "loss": 1.0,
        "samples": 8 * 4991,
    }


def test_a_resume_that_is_written_while_a_file_is_read_is_not_seen_by_halves(path: Path) -> None:
    write(path, 1, 2, 3)
    lines = CountedLines(path)
    write(path, 2, start_step=1)
    assert [record["step"] for block in lines.blocks() for record in block] == [1, 2, 3]
    assert list(losses(path)) == [1, 2]


def test_the_mean_rate_of_a_thinned_run_whose_last_line_is_an_evaluation(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "MAX_POINTS", 16)
    monkeypatch.setattr(metrics_module, "_BUFFER_POINTS", 64)
    lines = [{"step": step, "time": step / 4, "samples": 8 * step} for step in range(1, 1001)]
    after = [{"step": 1000 + i, "time": 250.0 + i, "eval": {"loss": 1.0}} for i in range(1, 9)]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in [*lines, *after]))
    found = read_curves(path, ("time", "samples"))
    assert len(found.series("time")[0]) <= 16
    assert metrics_module.mean_samples_per_s(path, found) == pytest.approx(32.0, rel=0.05)  # the time is interpolated
