"""metrics.jsonl: what is written, what a reader makes of it, and what is left of it after a kill."""

from __future__ import annotations

import errno
import json
import math
import os
from itertools import count
from multiprocessing import get_context
from multiprocessing.synchronize import Event as Event_
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.events import Event
from paceline.observe import metrics as metrics_module
from paceline.observe.event_log import EventLog
from paceline.observe.json_lines import LineReader, LineWriter
from paceline.observe.metrics import Metrics, MetricsReader, MetricsWriter, read_metrics, read_newest_metrics


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
    steps, values = read_metrics(path).series("loss")
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
    metrics = read_metrics(path)
    assert metrics.names() == ["time", "epoch", "loss", "lr", "shares/0", "shares/1", "eval/loss"]
    assert [metrics.last(name) for name in ("shares/1", "eval/loss", "shares/2", "step/x")] == [2, 2, None, None]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_text_to_json_and_numbers_to_us(path: Path, value: float) -> None:
    MetricsWriter(path).log(1, {"loss": value, "waiting": [0.5, value], "eval": {"loss": torch.tensor(value)}})

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    strict = json.loads(path.read_text(), parse_constant=refuse)
    assert strict["loss"] in ("NaN", "Infinity", "-Infinity")
    (row,) = read_metrics(path).rows
    for number in (row["loss"], row["waiting"][1], row["eval"]["loss"]):
        assert number == value or (math.isnan(number) and math.isnan(value))
    assert row["waiting"][0] == 0.5


def test_lines_of_one_step_add_up_and_the_newer_counts(path: Path) -> None:
    writer = MetricsWriter(path)
    writer.log(5, {"loss": 1.0, "eval": {"loss": 3.0, "accuracy": 0.5}})
    writer.log(5, {"loss": 2.0, "eval": {"loss": 4.0}})
    (row,) = read_metrics(path).rows
    assert (row["loss"], row["eval"]) == (2.0, {"loss": 4.0, "accuracy": 0.5})


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
    assert read_metrics(path).series("time")[1].tolist() == [7.0, 12.0]


def test_a_torn_last_line_is_passed_over_and_cut_off_by_the_next_writer(path: Path) -> None:
    write(path, 1, 2)
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[1])):
        path.write_bytes(whole[:-cut])
        assert losses(path) == {1: 1.0}
        assert read_metrics(path).num_unreadable == 0
        write(path, 2, start_step=1, loss=5.0)
        assert losses(path) == {1: 1.0, 2: 5.0}
        assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_torn_line_longer_than_a_block_is_cut_off(path: Path) -> None:
    path.write_bytes(b'{"step":1}\n{"step":2,"x":"' + b"y" * 200_000)
    LineWriter(path).close()
    assert path.read_bytes() == b'{"step":1}\n'
    path.write_bytes(b"z" * 200_000)
    LineWriter(path).close()
    assert path.read_bytes() == b""


def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing_of_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LineWriter(path)
    writer.write({"step": 1})
    real = os.write

    def write_a_piece(descriptor: int, line: bytes) -> int:
        if not line.startswith(b"{"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, line[:4])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_a_piece)
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
            writer.write({"step": 2})
    writer.write({"step": 3})
    assert path.read_text() == '{"step":1}\n{"step":3}\n'


def test_a_closed_file_says_so(path: Path) -> None:
    writer = LineWriter(path)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write({})


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
    metrics = read_metrics(path)
    assert [row["step"] for row in metrics.rows] == [1, 3]
    assert metrics.num_unreadable == 1


def test_two_halves_of_an_object_do_not_become_one(path: Path) -> None:
    path.write_bytes(b'{"step":1\n"loss":2}\n')
    assert read_metrics(path) == Metrics([], num_unreadable=2)


def test_values_that_are_no_numbers_are_no_series(path: Path) -> None:
    path.write_text('{"step":1,"loss":null,"lr":true,"x":"y","big":' + "9" * 400 + ',"deep":{"a":{"b":1}}}\n')
    metrics = read_metrics(path)
    assert metrics.names() == ["deep/a/b"]
    assert metrics.series("deep/a/b")[1].tolist() == [1.0]
    assert not len(metrics.series("loss")[0])


def test_a_reader_follows_what_is_added(path: Path) -> None:
    writer = MetricsWriter(path)
    reader = MetricsReader(path)
    assert not reader.poll()
    writer.log(1, {"loss": 1.0})
    assert reader.poll()
    with path.open("ab") as file:
        file.write(b'{"step":2,"lo')
        file.flush()
        assert not reader.poll()
        file.write(b'ss":2.0}\n')
    assert reader.poll()
    assert [row["step"] for row in reader.metrics.rows] == [1, 2]


@given(st.lists(st.integers(0, 30)), st.lists(st.integers(0, 30)))
def test_following_sees_what_reading_at_once_sees(cuts: list[int], steps: list[int]) -> None:
    text = "".join(
        json.dumps({"resumed_from": step // 2} if step % 7 == 0 else {"step": step, "n": i}) + "\n"
        for i, step in enumerate(steps)
    ).encode()
    path = Path(os.environ["TMPDIR"]) / "followed.jsonl"
    try:
        path.write_bytes(b"")
        reader = MetricsReader(path)
        place = 0
        for cut in [*cuts, len(text)]:
            with path.open("ab") as file:
                file.write(text[place : place + cut])
            place += cut
            reader.poll()
        assert reader.metrics == read_metrics(path)
    finally:
        path.unlink()


def test_the_end_of_a_long_file_is_read_without_the_rest(path: Path) -> None:
    write(path, *range(1, 3001))
    newest = read_newest_metrics(path)
    assert newest.last_step == 3000
    assert newest.last("loss") == 1.0
    assert len(newest.rows) < 3000


def test_a_hundred_thousand_lines_are_read_in_a_moment(path: Path) -> None:
    line = '{"step":%d,"time":1.5,"epoch":0,"loss":2.3125,"lr":0.001,"samples_per_s":812.5,"shares":[6,2]}\n'
    path.write_text("".join(line % step for step in range(1, 100_001)))
    began = monotonic()
    metrics = read_metrics(path)
    steps, values = metrics.series("loss")
    assert monotonic() - began < 10
    assert (len(steps), steps[-1], values[-1]) == (100_000, 100_000, 2.3125)


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
        reader = MetricsReader(path)
        seen = []
        for _ in range(3):
            reader.poll()
            seen.append(reader.metrics.last_step)
        assert seen[0] >= 50
        assert seen == sorted(seen)
    finally:
        writer.kill()
        writer.join()
    metrics = read_metrics(path)
    assert [row["step"] for row in metrics.rows] == list(range(1, len(metrics.rows) + 1))
    assert metrics.num_unreadable == 0
    at = metrics.last_step
    write(path, at + 1, start_step=at)
    assert read_metrics(path).last_step == at + 1


def test_events_are_written_down_whatever_their_details(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    details: dict[str, Any] = {"shares": (6, 2), "drift": math.nan, "path": Path("a"), "tensor": torch.ones(2)}
    log.write(Event("plan", 7, details))
    log.close()
    (record,) = LineReader(path).read()
    assert (record["event"], record["step"]) == ("plan", 7)
    assert record["details"]["shares"] == [6, 2]
    assert record["details"]["path"] == "a"
    assert record["details"]["tensor"] == "tensor([1., 1.])"
    assert math.isnan(record["details"]["drift"])
    assert isinstance(record["time"], float)
