"""What a timeline is written as for others to show: tables, Chrome's trace format, and a page."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from timeline_files import rows, run_of_two, session, write_lines

from paceline.observe.timeline.export import to_html
from paceline.observe.timeline.files import condense_file
from paceline.observe.timeline.timeline import Timeline

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def two(tmp_path: Path) -> Timeline:
    return Timeline.load(run_of_two(tmp_path / "two"))


def test_json_has_everything(two: Timeline) -> None:
    found = json.loads(two.to_json())
    assert [worker["rank"] for worker in found["workers"]] == [0, 1]
    for worker, lane in zip(found["workers"], two.lanes, strict=True):
        assert len(worker["spans"]) == len(lane.spans)
        by_kind: dict[str, float] = {}
        for kind, start, end, _, _ in worker["spans"]:
            by_kind[kind] = by_kind.get(kind, 0.0) + end - start
        assert {kind: s for kind, s in worker["seconds"].items() if s and kind != "other"} == pytest.approx(by_kind)
        assert sum(worker["seconds"].values()) == pytest.approx(worker["total_s"])
    assert [event["name"] for event in found["events"]] == ["start", "start", "save", "save"]


def test_csv_is_a_table_whose_rows_add_up(two: Timeline) -> None:
    table = list(csv.DictReader(io.StringIO(two.to_csv())))
    waited = sum(
        float(row["end_s"]) - float(row["start_s"])
        for row in table
        if row["what"] == "span" and row["name"] == "wait" and row["rank"] == "0"
    )
    assert waited == pytest.approx(0.6)
    assert {row["what"] for row in table} == {"span", "event", "sample"}


def test_chromes_format_is_what_its_viewers_read(two: Timeline) -> None:
    trace = json.loads(two.to_chrome())
    events = trace["traceEvents"]
    fields = {
        "M": {"ph", "name", "pid", "tid", "args"},
        "X": {"ph", "name", "pid", "tid", "ts", "dur", "args"},
        "i": {"ph", "name", "pid", "tid", "ts", "s", "args"},
        "C": {"ph", "name", "pid", "tid", "ts", "args"},
    }
    for event in events:
        assert event.keys() == fields[event["ph"]]
        assert isinstance(event["name"], str)
        assert all(type(event[key]) is int for key in ("pid", "tid"))
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert all(event["dur"] > 0 for event in timed if event["ph"] == "X")
    for tid in (0, 1):
        ends = 0.0
        for event in (event for event in timed if event["ph"] == "X" and event["tid"] == tid):
            assert event["ts"] >= ends - 1e-3  # on one thread nothing overlaps
            ends = event["ts"] + event["dur"]
    names = {e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert names == {"a", "rank 0 (cpu)", "rank 1 (cpu)"}
    assert all(set(e["args"].values()) <= {50.0, 51.0} for e in events if e["ph"] == "C")
    waited_us = sum(e["dur"] for e in timed if e["ph"] == "X" and e["name"] == "wait" and e["tid"] == 0)
    assert waited_us == pytest.approx(600_000)


def test_hosts_are_processes_and_condensed_spans_keep_their_seconds(tmp_path: Path) -> None:
    for rank, host in enumerate(("a", "b")):
        lines = [{"steps": rows(1 + 50 * i, 50, 10_000 * i)} for i in range(20)]
        path = write_lines(tmp_path / f"rank-{rank}.jsonl", session(rank, 2, host=host), *lines)
        condense_file(path, 30_000)
    events = json.loads(Timeline.load(tmp_path).to_chrome())["traceEvents"]
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {0: "a", 1: "b"}
    condensed = next(e for e in events if e["args"].get("first_step") == 1 and e["name"] == "compute")
    assert condensed["dur"] == sum(100 + i % 7 for i in range(condensed["args"]["step"]))


# The page


def test_the_page_needs_nothing_from_elsewhere_and_a_name_cannot_break_out(two: Timeline) -> None:
    two.name = "</script><script>alert(1)</script><!--"
    page = two.to_html()
    assert not re.search(r"(?:src|href)\s*=|https?://|@import|url\(", page)
    assert page.count("<script>") == page.count("</script>") + page.count("<script>alert") == 2


class Dom(HTMLParser):
    """The start tags of a page, each with its attributes and the text that follows it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any], list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs), []))

    def handle_data(self, data: str) -> None:
        if self.tags and data.strip():
            self.tags[-1][2].append(data.strip())

    def texts(self, **wanted: str) -> list[str]:
        return [
            " ".join(texts)
            for _, attributes, texts in self.tags
            if all(attributes.get(name.replace("_", "-")) == value for name, value in wanted.items())
        ]


def opened(page: str) -> Dom:
    """The page as it is in a browser, after its script has run; an error in the script fails the test."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome is installed: the page is not opened")
    note_errors = "<script>window.onerror = text => { document.documentElement.dataset.error = text; }</script>"
    # Under /tmp, since a browser's socket must have a short path.
    with tempfile.TemporaryDirectory(prefix="page-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "page.html")
        path.write_text(page.replace("<head>", f"<head>{note_errors}"))
        switches = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        done = subprocess.run(
            [CHROMIUM, *switches, f"--user-data-dir={folder}/profile", "--dump-dom", path.as_uri()],
            capture_output=True,
            text=True,
            timeout=90,
            env={**os.environ, "TMPDIR": folder, "HOME": folder},
        )
    dom = Dom(done.stdout)
    assert dom.tags, done.stderr[-2000:]
    assert not dom.tags[0][1].get("data-error"), dom.tags[0][1]["data-error"]
    return dom


def totals(dom: Dom) -> dict[int, dict[str, float]]:
    """Microseconds by rank and kind, as the page's script added them up."""
    found: dict[int, dict[str, float]] = {}
    for tag, attributes, _ in dom.tags:
        if tag == "tr" and "data-rank" in attributes:
            rank = int(attributes["data-rank"])
            found[rank] = {}
        elif tag == "td" and "data-kind" in attributes:
            found[rank][attributes["data-kind"]] = float(attributes["data-us"])
    return found


def expected(timeline: Timeline) -> dict[int, dict[str, float]]:
    return {w.rank: {k: 1e6 * s for k, s in w.seconds.items()} for w in timeline.summary().workers}


def test_a_browser_shows_a_lane_for_every_worker_and_the_right_sums(two: Timeline) -> None:
    dom = opened(two.to_html())
    assert dom.texts(**{"class": "lane"}) == ["rank 0", "rank 1"]
    lanes = [attributes for _, attributes, _ in dom.tags if attributes.get("class") == "lane"]
    assert [(int(lane["data-spans"]), float(lane["data-end-us"])) for lane in lanes] == [
        (len(lane.spans), pytest.approx(1e6 * lane.spans[-1].end, abs=1)) for lane in two.lanes
    ]
    assert dom.texts(id="title") == ["two"]
    assert dom.texts(id="about")[0].startswith("2 workers · 3 steps · 1.13 s · began 1970-01-01 00:16:40 UTC")
    for rank, by_kind in expected(two).items():
        assert totals(dom)[rank] == pytest.approx(by_kind, abs=2)
    assert "53.1%" in dom.texts(data_kind="wait")[0]


def test_a_browser_takes_in_a_long_run_of_many_workers(tmp_path: Path) -> None:
    for rank in range(16):
        lines = [{"steps": rows(1 + 50 * i, 50, 10_000 * i)} for i in range(8)]
        write_lines(tmp_path / "t" / f"rank-{rank}.jsonl", session(rank, 16), *lines, {"end": 80_000})
    timeline = Timeline.load(tmp_path / "t")
    page = to_html(timeline, max_spans=8_000)
    assert len(page) < len(to_html(timeline)) - 10_000
    dom = opened(page)
    assert len(dom.texts(**{"class": "lane"})) == 16
    for rank, by_kind in expected(timeline).items():
        # Condensed spans are rounded to microseconds one by one.
        assert totals(dom)[rank] == pytest.approx(by_kind, rel=1e-3, abs=200)
