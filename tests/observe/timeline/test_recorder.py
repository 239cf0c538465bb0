"""Recording a timeline: what is written, failing disks, and whole runs."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
from grouping import grouped
from models import mlp, vectors
from torch.nn import functional

import paceline as pl
from paceline.core.events import Events
from paceline.core.world import World
from paceline.observe.json_lines import LineWriter
from paceline.observe.timeline import recorder as recorder_module
from paceline.observe.timeline.recorder import SystemSampler, TimelineRecorder
from paceline.observe.timeline.timeline import Timeline


def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    events = Events()
    recorder = TimelineRecorder(tmp_path, World(), events)
    begin = perf_counter()
    moments = [0.0, 0.001, 0.002, 0.005, 0.045, 0.046, 0.047, 0.067, 0.068]
    recorder.step(1, [begin + at for at in moments])
    recorder.span("evaluation", begin + 0.1, begin + 0.35)
    recorder.span("writing", begin + 0.1, begin + 0.9)
    events.step = 1
    events.emit("plan", shares=(4, 4))
    recorder.close()
    timeline = Timeline.load(tmp_path)
    (worker,) = timeline.summary().workers
    expected = {"data": 0.004, "compute": 0.04, "optimizer": 0.022, "evaluation": 0.25}  # alone, nothing is exchanged
    assert {kind: worker.seconds[kind] for kind in expected} == pytest.approx(expected, abs=5e-6)
    assert worker.seconds["sync"] == worker.seconds["wait"] == 0
    assert sum(worker.seconds.values()) == pytest.approx(worker.total_s)
    assert worker.writing_s == pytest.approx(0.8, abs=5e-6)
    assert worker.num_steps == 1
    found = [(e.name, e.step, dict(e.details)) for e in timeline.events if e.name != "garbage collection"]
    assert found == [("start", 0, {}), ("plan", 1, {"shares": [4, 4]})]


def test_a_thread_writes_while_the_run_goes_on_and_is_gone_afterwards(tmp_path: Path) -> None:
    recorder = TimelineRecorder(tmp_path, World(), Events())
    assert any(thread.name == "paceline-timeline" for thread in threading.enumerate())
    recorder.close()
    recorder.close()
    assert not any(thread.name == "paceline-timeline" for thread in threading.enumerate())


@pytest.mark.parametrize("first", ['{"session": {"version": 1, "rank": 0}}\n', ""])
def test_a_file_of_an_earlier_version_is_moved_aside(tmp_path: Path, first: str) -> None:
    (tmp_path / "rank-0.jsonl").write_text(first)
    recorder = TimelineRecorder(tmp_path, World(), Events())
    recorder.step(1, [perf_counter()] * 9)
    recorder.close()
    assert [lane.rank for lane in Timeline.load(tmp_path).lanes] == [0]
    assert (tmp_path / "rank-0.jsonl.old").exists() is bool(first)


@pytest.mark.parametrize("content", [b"\x93\xfe\n", b'{"session": {"version": 2}}\n{"steps\x84'])
def test_a_run_goes_on_with_a_damaged_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank-0.jsonl").write_bytes(content)
    TimelineRecorder(tmp_path, World(), Events()).close()
    complete_lines = content[: content.rindex(b"\n") + 1]
    assert (tmp_path / "rank-0.jsonl").read_bytes().startswith(complete_lines)


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written to .* choose another folder"):
        TimelineRecorder(tmp_path / "file", World(), Events())


def test_a_full_disk_ends_the_timeline_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "INTERVAL_S", 1000.0)  # only `close` writes
    recorder = TimelineRecorder(tmp_path, World(), Events())

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LineWriter, "write", refuse)
    recorder.step(1, [perf_counter()] * 6)
    with pytest.warns(
        UserWarning, match=rf"{tmp_path / 'rank-0.jsonl'} cannot be written, the timeline ends here.*No space left"
    ) as seen:
        recorder.close()
    assert len(seen) == 1
    assert Timeline.load(tmp_path).lanes[0].num_steps == 0


def test_what_a_system_does_not_tell_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = SystemSampler(torch.device("cpu"), whole_host=True)
    found = sampler.sample()
    assert found["cpu"] >= 0
    assert found["memory"] > 1e6
    assert 0 <= found.get("host_cpu", 0.0) <= 100  # unknown, if the kernel has counted no tick since the last sample
    assert found.keys() - {"host_cpu"} == {"cpu", "memory", "host_memory"}
    monkeypatch.setattr(recorder_module, "Path", lambda name: tmp_path / "nothing" / name.lstrip("/"))
    assert sampler.sample().keys() == {"cpu"}


def test_a_slow_garbage_collection_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TimelineRecorder(tmp_path, World(), Events())
    monkeypatch.setattr(recorder_module, "SLOW_S", 0.0)
    gc.collect()
    num_callbacks = len(gc.callbacks)
    recorder.close()
    assert len(gc.callbacks) == num_callbacks - 1
    assert {event.name for event in Timeline.load(tmp_path).events} == {"start", "garbage collection"}


# Whole runs


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def train(folder: Path, *, delay: Any = None, **settings: Any) -> pl.reports.Report:
    """Two epochs of four steps, two micro-batches each."""
    data = vectors(32)
    settings = {"global_batch": 8, "micro_batch": 4, "shares": "equal", "quiet": True, **settings}
    with pl.Trainer.setup(
        mlp, lambda p: torch.optim.SGD(p, lr=0.1), data=data, **grouped(timeline=folder, **settings)
    ) as trainer:
        trainer.every_epoch(1, lambda _: trainer.evaluate(data, loss_of))
        for epoch in trainer.epochs(2):
            for batch in epoch:
                if delay is not None:
                    delay(trainer)
                trainer.backward(loss_of(trainer.model, batch))
                trainer.step()
        return trainer.report()


def test_a_run_with_all_that_can_happen_in_one(tmp_path: Path) -> None:
    train(tmp_path / "timeline", checkpoints=pl.Checkpoints(tmp_path / "checkpoints", every_steps=4))
    timeline = Timeline.load(tmp_path)
    (lane,) = timeline.lanes
    assert lane.num_steps == 8
    count = {kind: sum(span.kind == kind for span in lane.spans) for kind in ("compute", "evaluation", "checkpoint")}
    assert count == {"compute": 16, "evaluation": 2, "checkpoint": 2}
    assert len(lane.writing) == 2
    assert all(earlier.end <= later.start for earlier, later in zip(lane.spans, lane.spans[1:], strict=False))
    names = [event.name for event in timeline.events if event.name != "garbage collection"]
    assert names == ["start", "epoch begin", "plan", "epoch end", "epoch begin", "save", "epoch end", "save"]
    (worker,) = timeline.summary().workers
    assert sum(worker.seconds.values()) == pytest.approx(worker.total_s)


def test_the_cause_of_an_idle_gap_between_two_steps_is_recorded(tmp_path: Path) -> None:
    def collect() -> None:
        # What its callbacks are told is what a collection of millions of objects would tell them.
        for phase in ("start", "stop"):
            for callback in list(gc.callbacks):
                callback(phase, {"generation": 2})
            sleep(0.25 if phase == "start" else 0.0)

    def between_steps(trainer: pl.Trainer) -> None:
        if trainer.position.step == 2 and not collected:
            collected.append(2)
            collect()

    collected: list[int] = []
    with pl.Trainer.setup(
        mlp, lambda p: torch.optim.SGD(p, lr=0.1), data=vectors(32), **grouped(global_batch=4, timeline=tmp_path)
    ) as trainer:
        trainer.every(5, lambda _: sleep(0.25))
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(loss_of(trainer.model, batch))
                trainer.step()
                between_steps(trainer)
    timeline = Timeline.load(tmp_path)
    gaps = [(gap.step, gap.cause) for gap in timeline.idle_gaps(min_s=0.2) if gap.step in (2, 5)]
    assert sorted(gaps) == [(2, "garbage collection"), (5, "hook")]
    assert "hook" not in {event.name for event in timeline.events}


def test_an_error_is_an_event(tmp_path: Path) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no luck\ntoday")

    with pytest.raises(RuntimeError, match="no luck"):
        train(tmp_path, delay=fail)
    faults = [event for event in Timeline.load(tmp_path).events if event.name == "fault"]
    assert [dict(fault.details) for fault in faults] == [{"error": "RuntimeError", "text": "no luck"}]


def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(None)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def slow_second_worker(folder: str) -> tuple[float, float]:
    from time import sleep

    report = train(Path(folder), delay=lambda trainer: sleep(0.05 * trainer.world.rank))
    return report.workers[0].waiting_s, report.workers[1].waiting_s


def test_the_fast_worker_is_seen_waiting_for_the_slow_one(pool: Any, tmp_path: Path) -> None:
    waited_s = pool.run(slow_second_worker, 2, str(tmp_path))[0]
    fast, slow = Timeline.load(tmp_path).summary().workers
    # A step's exchange is reported with the next one, and the first is not: the timeline knows two more.
    assert fast.seconds["wait"] >= waited_s[0] > 0
    assert fast.seconds["wait"] > slow.seconds["wait"]
    assert slow.seconds["compute"] > 8 * 0.05
    assert slow.seconds["compute"] > fast.seconds["compute"]
