"""Reading timelines: waiting, damaged files, resumed runs, clocks, ranges and idle gaps."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from timeline_files import run_of_two, session, step, write_lines

from paceline.core.events import Events
from paceline.core.world import World
from paceline.observe.timeline.recorder import TimelineRecorder
from paceline.observe.timeline.timeline import Timeline


def seconds(folder: Path, rank: int = 0) -> dict[str, float]:
    return {kind: round(s, 6) for kind, s in Timeline.load(folder).summary().workers[rank].seconds.items() if s}


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
    names = [event.name for event in timeline.events if event.name != "garbage collection"]
    assert names == ["start", "crashed", "restart"]


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
    with pytest.raises(ValueError, match="the range from step 3 to step 2 is empty"):
        Timeline.load(tmp_path).between(3, 2)


def test_idle_gaps_name_their_cause(tmp_path: Path) -> None:
    lines = {
        "steps": [step(1, 1_500_000), step(2, 1_600_000, data=4_000_000), step(3, 9_000_000)],
        "spans": [["checkpoint", 5_700_000, 8_700_000, 2, 2]],
    }
    write_lines(tmp_path / "rank-0.jsonl", session(), lines, {"end": 9_500_000})
    gaps = Timeline.load(tmp_path).idle_gaps(min_s=1.0)
    assert [(round(gap.start, 1), round(gap.seconds, 1), gap.step, gap.cause) for gap in gaps] == [
        (1.5, 4.1, 1, "data"),
        (5.6, 3.4, 2, "saving"),
        (0.0, 1.5, 0, "setup"),
    ]
    assert Timeline.load(tmp_path).idle_gaps(min_s=5.0) == []


# What was noted in a gap from 1 s to 3 s (name, end, seconds), and the cause.
@pytest.mark.parametrize(
    ("noted", "cause"),
    [
        ([], "other"),
        ([("garbage collection", 2.5, 1.2)], "garbage collection"),
        ([("garbage collection", 2.5, 0.9)], "other"),
        ([("plotting", 2.9, 1.8)], "plotting"),
        ([("hook", 2.9, 1.8)], "hook"),
        ([("hook", 2.9, 1.8), ("garbage collection", 2.8, 1.5)], "garbage collection"),  # inside of the hook
        ([("hook", 2.9, 1.8), ("garbage collection", 2.8, 0.5)], "hook"),
        ([("logging", 1.4, 0.4), ("logging", 2.0, 0.5), ("hook", 2.9, 0.5)], "logging"),
        ([("garbage collection", 1.3, 30.0)], "other"),  # mostly before it
        ([("garbage collection", 3.1, 0.1)], "other"),  # after it
    ],
)
def test_what_was_slow_between_two_steps_is_the_cause_of_an_idle_gap(
    tmp_path: Path, noted: list[tuple[str, float, float]], cause: str
) -> None:
    events = [[name, 1, int(1e6 * end), {"seconds": seconds}] for name, end, seconds in noted]
    steps = [step(1, 0, compute=999_990), step(2, 3_000_000)]
    write_lines(tmp_path / "rank-0.jsonl", session(), {"steps": steps, "events": events}, {"end": 3_100_000})
    (gap,) = Timeline.load(tmp_path).idle_gaps()
    assert (gap.start, gap.end, gap.step, gap.cause) == (1.0, 3.0, 1, cause)


def test_a_folder_without_a_timeline_is_an_error_that_tells_how_to_have_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no timeline: record one with Runtime\(timeline=folder\)"):
        Timeline.load(tmp_path)
    header = session()
    header["session"]["version"] = 99
    write_lines(tmp_path / "rank-0.jsonl", header)
    with pytest.raises(ValueError, match="has version 99, this paceline reads version 2"):
        Timeline.load(tmp_path)


def test_a_clock_that_was_set_back_between_two_starts(tmp_path: Path) -> None:
    again = [session(unix_time=500.0), {"steps": [step(2, 0)]}, {"end": 200}]
    write_lines(tmp_path / "rank-0.jsonl", session(unix_time=1000.0), {"steps": [step(1, 0)]}, *again)
    events = [(event.name, event.time) for event in Timeline.load(tmp_path).events]
    assert sorted(events) == [("crashed", 500.00011), ("restart", 0.0), ("start", 500.0)]
