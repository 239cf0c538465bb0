"""The files of a timeline: the moments of a step, and condensing."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import pytest
from timeline_files import rows, sample, session, step, write_lines

from paceline.core.events import Events
from paceline.core.world import World
from paceline.observe.timeline.files import condense_file, kinds_between
from paceline.observe.timeline.recorder import TimelineRecorder
from paceline.observe.timeline.timeline import Timeline


@pytest.mark.parametrize(
    ("num_moments", "kinds"),
    [
        (6, ("data", "", "sync", "optimizer", "average")),
        (9, ("data", "", "data", "compute", "", "sync", "optimizer", "average")),
        (12, ("data", "", "data", "compute", "", "data", "compute", "", "sync", "optimizer", "average")),
    ],
)
def test_what_lies_between_moments(num_moments: int, kinds: tuple[str, ...]) -> None:
    assert kinds_between(num_moments) == kinds


def test_what_is_long_past_is_condensed_and_its_sums_are_not(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    lines = [{"steps": rows(1 + 50 * i, 50, 10_000 * i), "samples": [sample(10_000 * i, i % 3)]} for i in range(200)]
    spans = {"spans": [["evaluation", 2_520, 2_590, 13, 13], ["writing", 2_500, 11_500, 10, 10]]}
    write_lines(path, session(), spans, *lines, {"end": 2_000_000})
    before = Timeline.load(tmp_path).summary().workers[0]
    size = path.stat().st_size
    condense_file(path, size - 1)
    timeline = Timeline.load(tmp_path)
    after = timeline.summary().workers[0]
    assert path.stat().st_size <= 0.75 * size
    assert {k: round(s, 6) for k, s in after.seconds.items()} == {k: round(s, 6) for k, s in before.seconds.items()}
    assert after.num_steps == before.num_steps == 10_000
    assert after.writing_s == pytest.approx(before.writing_s)
    assert timeline.idle_gaps(min_s=0.001) == []
    assert after.use["cpu"] == pytest.approx(before.use["cpu"], abs=0.2)
    (lane,) = timeline.lanes
    assert lane.spans[-1].step == 10_000
    assert 0 < lane.spans[0].step - lane.spans[0].first_step < 64
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
