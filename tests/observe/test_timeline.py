"""The timeline: what was measured is what is read back, whatever happened to the files."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from grouping import grouped
from models import mlp, vectors
from timeline_files import rows, run_of_two, sample, session, step, write_lines
from torch.nn import functional

import paceline as pl
from paceline.core.events import Events
from paceline.core.world import World
from paceline.observe import system_samples
from paceline.observe.json_lines import LineWriter
from paceline.observe.timeline.condensing import condense_file
from paceline.observe.timeline.layout import kinds_between
from paceline.observe.timeline.recorder import TimelineRecorder
from paceline.observe.timeline.timeline import Timeline


def seconds(folder: Path, rank: int = 0) -> dict[str, float]:
    return {kind: round(s, 6) for kind, s in Timeline.load(folder).summary().workers[rank].seconds.items() if s}


@pytest.mark.parametrize(
    ("num_moments", "kinds"),
    [
        (6, ("data", "", "sync", "optimizer", "sync")),
        (9, ("data", "", "data", "compute", "", "sync", "optimizer", "sync")),
        (12, ("data", "", "data", "compute", "", "data", "compute", "", "sync", "optimizer", "sync")),
    ],
)
def test_what_lies_between_moments(num_moments: int, kinds: tuple[str, ...]) -> None:
    assert kinds_between(num_moments) == kinds


# Recording


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
    assert [(e.name, e.step, dict(e.details)) for e in timeline.events] == [
        ("start", 0, {}),
        ("plan", 1, {"shares": [4, 4]}),
    ]


def test_a_thread_writes_while_the_run_goes_on_and_is_gone_afterwards(tmp_path: Path) -> None:
    recorder = TimelineRecorder(tmp_path, World(), Events())
    assert any(thread.name == "paceline-timeline" for thread in threading.enumerate())
    recorder.close()
    recorder.close()
    assert not any(thread.name == "paceline-timeline" for thread in threading.enumerate())


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written to .* choose another folder"):
        TimelineRecorder(tmp_path / "file", World(), Events())


def test_a_full_disk_ends_the_timeline_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TimelineRecorder(tmp_path, World(), Events())

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LineWriter, "write", refuse)
    recorder.step(1, [perf_counter()] * 6)
    with pytest.warns(
        UserWarning, match=rf"the timeline ends here.*{tmp_path / 'rank-0.jsonl'}.*No space left"
    ) as seen:
        recorder.close()
    assert len(seen) == 1
    assert Timeline.load(tmp_path).lanes[0].num_steps == 0


def test_what_a_system_does_not_tell_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = system_samples.SystemSampler(torch.device("cpu"), whole_host=True)
    cpu, memory, host_cpu, host_memory, gpu, gpu_memory = sampler.sample()
    assert cpu is not None
    assert cpu >= 0
    assert memory is not None
    assert memory > 1e6
    assert host_cpu is None or 0 <= host_cpu <= 100
    assert host_memory is not None
    assert gpu is gpu_memory is None
    monkeypatch.setattr(system_samples, "Path", lambda name: tmp_path / "nothing" / name.lstrip("/"))
    assert sampler.sample()[1:] == [None] * 5


def test_a_garbage_collection_that_took_its_time_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TimelineRecorder(tmp_path, World(), Events())
    gc.collect(0)
    monkeypatch.setattr("paceline.observe.timeline.recorder.NOTED_GARBAGE_S", 0.0)
    gc.collect()
    recorder.close()
    gc.collect()
    assert [event.name for event in Timeline.load(tmp_path).events] == ["start", "garbage collection"]


# Keeping it small


def test_what_is_long_past_is_condensed_and_its_sums_are_not(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    lines = [{"steps": rows(1 + 50 * i, 50, 10_000 * i), "samples": [sample(10_000 * i, i % 3)]} for i in range(200)]
    spans = {"spans": [["evaluation", 13, 2_520, 70], ["writing", 10, 2_500, 9_000]]}
    write_lines(path, session(), spans, *lines, {"end": 2_000_000})
    before = Timeline.load(tmp_path).summary().workers[0]
    size = path.stat().st_size
    condense_file(path, size - 1)
    timeline = Timeline.load(tmp_path)
    after = timeline.summary().workers[0]
    assert path.stat().st_size <= 0.75 * size
    assert {k: round(s, 6) for k, s in after.seconds.items()} == {k: round(s, 6) for k, s in before.seconds.items()}
    assert after.num_steps == before.num_steps == 10_000
    assert after.use["cpu"] == pytest.approx(before.use["cpu"], abs=0.2)
    (lane,) = timeline.lanes
    assert lane.spans[-1].step == 10_000
    assert lane.stretches[0].last_step - lane.stretches[0].first_step < 64
    condense_file(path, 2_000)
    assert path.stat().st_size <= 1_500
    assert Timeline.load(tmp_path).summary().workers[0].num_steps == 10_000


def test_a_recorder_keeps_to_its_limit_however_long_it_goes_on(tmp_path: Path) -> None:
    for turn in range(6):
        recorder = TimelineRecorder(tmp_path, World(), Events(), max_bytes=20_000)
        now = perf_counter()
        for i in range(500):
            recorder.step(500 * turn + i + 1, [now] * 9)
        recorder.close()
    assert (tmp_path / "rank-0.jsonl").stat().st_size <= 20_000
    timeline = Timeline.load(tmp_path)
    assert timeline.lanes[0].num_steps == 3000
    assert len(timeline.lanes[0].extents) == 6


def test_workers_condense_alike_so_that_waiting_is_still_told_from_exchanging(tmp_path: Path) -> None:
    for rank, compute in enumerate((100, 300)):
        steps = [step(1 + i, 400 * i, compute=compute, sync=320 - compute) for i in range(1000)]
        path = write_lines(tmp_path / f"rank-{rank}.jsonl", session(rank, 2), {"steps": steps})
        condense_file(path, 8_000)
    workers = Timeline.load(tmp_path).summary().workers
    assert [round(w.seconds["wait"], 6) for w in workers] == [0.2, 0.0]
    assert [round(w.seconds["sync"], 6) for w in workers] == [0.02, 0.02]


# Reading


def test_who_comes_last_waits_for_nobody(tmp_path: Path) -> None:
    folder = run_of_two(tmp_path)
    fast = {"compute": 0.3, "data": 0.03, "wait": 0.6, "sync": 0.06, "optimizer": 0.09, "other": 0.05}
    slow = {"compute": 0.9, "data": 0.03, "sync": 0.06, "optimizer": 0.09, "other": 0.05}
    assert seconds(folder, 0) == fast
    assert seconds(folder, 1) == slow
    assert [worker.use for worker in Timeline.load(folder).summary().workers] == [{"cpu": 50.0}, {"cpu": 51.0}]
    assert str(Timeline.load(folder).summary()).splitlines()[:3] == [
        "worker   steps seconds compute   data   wait   sync  optim saving   eval  other",
        "     0       3     1.1   26.5%   2.7%  53.1%   5.3%   8.0%   0.0%   0.0%   4.4%",
        "     1       3     1.1   79.6%   2.7%   0.0%   5.3%   8.0%   0.0%   0.0%   4.4%",
    ]


def test_a_torn_tail_and_what_nobody_can_read_is_passed_over(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rank-0.jsonl", session(), {"steps": [step(1, 0)]})
    with path.open("ab") as file:
        file.write(b'\x00\x01 no json\n{"steps": [[1, "two"], [2], 3], "events": "none"}\n')
        file.write(json.dumps({"steps": [step(2, 200)]}).encode() + b"\n")
        file.write(b'{"steps": [[3, 400, 0, 0, 0, 10')
    assert Timeline.load(tmp_path).lanes[0].num_steps == 2
    recorder = TimelineRecorder(tmp_path, World(), Events())
    recorder.step(3, [perf_counter()] * 6)
    recorder.close()
    timeline = Timeline.load(tmp_path)
    assert timeline.lanes[0].num_steps == 3
    assert [event.name for event in timeline.events] == ["start", "broken off", "restart"]


def test_a_run_that_goes_on_pairs_the_steps_that_it_went_over_again(tmp_path: Path) -> None:
    for rank, sync in enumerate((50, 20)):
        first = {"steps": [step(1, 0, sync=sync), step(2, 500, sync=10 * sync)]}
        again = {"steps": [step(2, 0, sync=sync), step(3, 500, sync=sync)]}
        both = [session(rank, 2), first, session(rank, 2, unix_time=2000.0), again]
        # Rank 1 was killed before it had written step 2.
        lines = both if rank == 0 else [both[0], {"steps": [step(1, 0, sync=sync)]}, *both[2:]]
        write_lines(tmp_path / f"rank-{rank}.jsonl", *lines)
    waits = [(span.step, round(1e6 * (span.end - span.start))) for span in spans_of(tmp_path, 0, "wait")]
    assert waits == [(1, 30), (2, 30), (3, 30)]
    assert sum(s.end - s.start for s in spans_of(tmp_path, 0, "sync")) == pytest.approx((3 * 20 + 500) / 1e6)


def spans_of(folder: Path, rank: int, kind: str) -> list[Any]:
    return [span for span in Timeline.load(folder).lanes[rank].spans if span.kind == kind]


def test_hosts_whose_clocks_differ_are_laid_side_by_side(tmp_path: Path) -> None:
    for rank, (host, ahead_s) in enumerate((("a", 0.0), ("b", 5.0))):
        steps = [step(n, 1000 * n, sync=100) for n in range(1, 6)]
        header = session(rank, 2, host=host, unix_time=1000.0 + ahead_s)
        write_lines(tmp_path / f"rank-{rank}.jsonl", header, {"steps": steps})
    first, second = Timeline.load(tmp_path).lanes
    assert [round(span.start, 6) for span in first.spans] == [round(span.start, 6) for span in second.spans]


def test_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    timeline = Timeline.load(run_of_two(tmp_path)).between(2, 2)
    for worker in timeline.summary().workers:
        assert worker.num_steps == 1
        assert worker.seconds["optimizer"] == pytest.approx(0.03)
        assert worker.seconds["other"] == pytest.approx(0.0, abs=1e-9)
    assert timeline.duration_s == pytest.approx(0.36)
    assert [event.name for event in timeline.events] == ["save", "save"]
    with pytest.raises(ValueError, match="there is no step from 9 on: the timeline ends with step 3"):
        Timeline.load(tmp_path).between(9)
    with pytest.raises(ValueError, match="from step 3 to step 2 there is nothing"):
        Timeline.load(tmp_path).between(3, 2)


def test_idle_gaps_name_their_cause(tmp_path: Path) -> None:
    lines = {
        "steps": [step(1, 1_500_000), step(2, 1_600_000, data=4_000_000), step(3, 9_000_000)],
        "spans": [["checkpoint", 2, 5_700_000, 3_000_000]],
    }
    write_lines(tmp_path / "rank-0.jsonl", session(), lines, {"end": 9_500_000})
    gaps = Timeline.load(tmp_path).idle_gaps(min_s=1.0)
    assert [(round(gap.start, 1), round(gap.seconds, 1), gap.step, gap.cause) for gap in gaps] == [
        (1.5, 4.1, 1, "data"),
        (5.6, 3.4, 2, "checkpoint"),
        (0.0, 1.5, 0, "other"),
    ]
    assert Timeline.load(tmp_path).idle_gaps(min_s=5.0) == []


def test_a_folder_without_a_timeline_is_an_error_that_tells_how_to_have_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no timeline: record one with Runtime\(timeline=folder\)"):
        Timeline.load(tmp_path)
    header = session()
    header["session"]["version"] = 99
    write_lines(tmp_path / "rank-0.jsonl", header)
    with pytest.raises(ValueError, match="has version 99, this paceline reads version 1"):
        Timeline.load(tmp_path)


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


def test_an_error_is_an_event(tmp_path: Path) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no luck\ntoday")

    with pytest.raises(RuntimeError, match="no luck"):
        train(tmp_path, delay=fail)
    fault = Timeline.load(tmp_path).events[-1]
    assert (fault.name, dict(fault.details)) == ("fault", {"error": "RuntimeError", "text": "no luck"})


def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(None)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def slow_second_worker(folder: str) -> tuple[float, float]:
    from time import sleep

    report = train(Path(folder), delay=lambda trainer: sleep(0.02 * trainer.world.rank))
    return report.workers[0].waiting_s, report.workers[1].waiting_s


def test_the_fast_worker_is_seen_waiting_for_the_slow_one(pool: Any, tmp_path: Path) -> None:
    waited_s = pool.run(slow_second_worker, 2, str(tmp_path))[0]
    fast, slow = Timeline.load(tmp_path).summary().workers
    # A step's exchange is reported with the next one, and the first is not: the timeline knows two more.
    assert fast.seconds["wait"] >= waited_s[0] > 0
    assert fast.seconds["wait"] > 0.05 > slow.seconds["wait"]
    assert slow.seconds["compute"] > 8 * 0.02 > fast.seconds["compute"]
