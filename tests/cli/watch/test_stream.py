"""What is pushed while files grow: without holes, without doubles, through resumes, kills and reconnections."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
from made_runs import make_run, row
from served import Client, served

from paceline.cli.watch import runs as runs_module
from paceline.cli.watch import stream as stream_module
from paceline.observe.run_files import RunFiles, process_started

LIVE = {"state": "running", "pid": os.getpid(), "process_started": process_started(os.getpid())}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(stream_module, "POLL_S", 0.01)
    monkeypatch.setattr(stream_module, "SLOW_POLL_S", 0.01)
    monkeypatch.setattr(runs_module, "SCAN_INTERVAL_S", 0.02)
    monkeypatch.setattr(runs_module, "SCAN_INTERVAL_RATIO", 0.0)
    with served(tmp_path) as client:
        yield client


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return make_run(tmp_path, "live", [row(1)], status={**LIVE, "host": socket.gethostname()})


def append(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)


def of_kind(events: Iterator[tuple[str, Any, str]], kind: str) -> Iterator[tuple[Any, str]]:
    for name, data, event_id in events:
        if name == kind:
            yield data, event_id


def steps(events: Iterator[tuple[str, Any, str]], count: int) -> list[int]:
    """The steps of so many new lines; negative for a resume."""
    found: list[int] = []
    for data, _ in of_kind(events, "metrics"):
        found += [record.get("step", -record.get("resumed_from", 0)) for record in map(json.loads, data["lines"])]
        if len(found) >= count:
            return found
    return found


def test_new_lines_come_once_each(client: Client, files: RunFiles) -> None:
    offset = client.get(f"/api/runs/{files.root.name}/metrics")["offset"]
    append(files.metrics, row(2))
    with client.stream(f"/api/stream?run={files.root.name}&metrics={offset}") as events:
        assert steps(events, 1) == [2], "written between the two requests"
        with files.metrics.open("a") as file:
            file.write('{"step": 3, "loss"')
            file.flush()
            append(files.events, {"time": 1.0, "step": 2, "event": "plan", "details": {"shares": [1], "before": [2]}})
            data, _ = next(of_kind(events, "events"))
            assert data["events"][0]["text"] == "shares 1, before 2"
            file.write(': 0.5, "waiting": [0.25]}\n')
        data, _ = next(of_kind(events, "metrics"))
        assert data["lines"] == ['{"step": 3, "loss": 0.5, "waiting": [0.25]}']
        assert data["offset"] == files.metrics.stat().st_size
        append(files.metrics, *map(row, range(4, 40)))
        assert steps(events, 36) == list(range(4, 40))


def test_a_resumed_run_says_which_points_are_superseded(client: Client, files: RunFiles) -> None:
    with client.stream(f"/api/stream?run={files.root.name}") as events:
        append(files.metrics, row(2), row(3), {"resumed_from": 1}, row(2))
        assert steps(events, 4) == [2, 3, -1, 2]


def test_a_client_that_comes_back_continues_where_it_was(client: Client, files: RunFiles) -> None:
    path = f"/api/stream?run={files.root.name}&metrics=0"
    with client.stream(path) as events:
        event_id = ""
        while not event_id:
            _, _, event_id = next(events)
    append(files.metrics, row(2), row(3))
    with client.stream(path, **{"Last-Event-ID": event_id}) as events:
        assert steps(events, 2) == [2, 3]


def test_a_file_that_is_replaced_begins_again(client: Client, files: RunFiles) -> None:
    with client.stream(f"/api/stream?run={files.root.name}") as events:
        next(of_kind(events, "run"))
        files.metrics.write_text("")
        next(of_kind(events, "restart"))
        append(files.metrics, row(7))
        assert steps(events, 1) == [7]


def test_a_client_that_is_far_behind_fetches_everything_again(
    client: Client, files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "MAX_BEHIND_BYTES", 100)
    append(files.metrics, *map(row, range(2, 9)))
    with client.stream(f"/api/stream?run={files.root.name}&metrics=0") as events:
        assert next(events)[0] == "restart"


def test_the_run_its_log_and_its_checkpoints(client: Client, files: RunFiles) -> None:
    (files.ranks / "rank-1.err").write_text("before\n")
    with client.stream(f"/api/stream?run={files.root.name}&log=1") as events:
        data, _ = next(of_kind(events, "log"))
        assert data == {"rank": 1, "stream": "err", "lines": ["before"], "is_cut": True}
        first, _ = next(of_kind(events, "run"))
        assert (first["state"], first["step"]) == ("live", 1)
        saved = next(of_kind(events, "checkpoints"))
        with (files.ranks / "rank-1.err").open("a") as file:
            file.write("new <b>line</b>\nhalf")
        data, _ = next(of_kind(events, "log"))
        assert data == {"rank": 1, "stream": "err", "lines": ["new <b>line</b>"], "is_cut": False}
        assert saved[0]["checkpoints"] == []
        folder = files.checkpoints / "step-00000001"
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
        data, _ = next(of_kind(events, "checkpoints"))
        assert [each["step"] for each in data["checkpoints"]] == [1]


def test_a_run_that_is_killed_is_noticed_without_a_write(client: Client, files: RunFiles) -> None:
    status = json.loads(files.status.read_text())
    with client.stream(f"/api/stream?run={files.root.name}") as events:
        assert next(of_kind(events, "run"))[0]["state"] == "live"
        # The process behind the status is another one: as after kill -9 and a new process of that number.
        files.status.write_text(json.dumps(status | {"process_started": 1}))
        states = (data["state"] for data, _ in of_kind(events, "run"))
        assert next(state for state in states if state != "live") == "crashed"


def test_growth_travels_together_and_with_the_next_news(
    client: Client, files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = Semaphore(0)
    has_news = stream_module.RunSource.has_news

    def has_news_and_tells(source: stream_module.RunSource) -> bool:
        looked.release()
        return has_news(source)

    monkeypatch.setattr(stream_module.RunSource, "has_news", has_news_and_tells)
    with client.stream(f"/api/stream?run={files.root.name}&every=60") as events:
        assert next(of_kind(events, "run"))[0]["is_news"]
        for step in (2, 3):
            append(files.metrics, row(step))
            append(files.events, {"time": 1.0, "step": step, "event": "plan", "details": {}})
            for _ in range(2):
                assert looked.acquire(timeout=60)
        append(files.events, {"time": 1.0, "step": 3, "event": "save", "details": {}})
        next(of_kind(events, "checkpoints"))  # of the first look
        found = [next(events)[:2] for _ in range(3)]
        assert [name for name, _ in found] == ["metrics", "events", "run"]
        assert [json.loads(line)["step"] for line in found[0][1]["lines"]] == [2, 3]
        assert [event["event"] for event in found[1][1]["events"]] == ["plan", "plan", "save"]
        assert not found[2][1]["is_news"]  # an event; neither the state nor a verdict
        append(files.metrics, row(4))
        status = json.loads(files.status.read_text())
        files.status.write_text(json.dumps(status | {"state": "finished"}))
        assert steps(events, 1) == [4]
        data, _ = next(of_kind(events, "run"))
        assert (data["state"], data["is_news"]) == ("finished", True)


def test_whether_a_run_grows_decides_how_soon_it_is_looked_at_again(files: RunFiles, tmp_path: Path) -> None:
    runs = runs_module.Runs(tmp_path)
    run = runs.find(files.root.name)
    assert run is not None
    source = stream_module.RunSource(runs, run, {})
    list(source.new())
    assert (source.has_news(), source.is_growing) == (False, False)
    append(files.metrics, row(2))
    assert (source.has_news(), source.is_growing) == (False, True)
    assert (source.has_news(), source.is_growing) == (False, False)


def test_a_run_that_comes_is_news_of_the_list(client: Client, files: RunFiles, tmp_path: Path) -> None:
    with client.stream("/api/stream?every=60") as events:
        next(of_kind(events, "runs"))
        append(files.metrics, row(2))
        other = make_run(tmp_path, "other", minutes=1)
        data, _ = next(of_kind(events, "runs"))
        assert other.root.name in [each["id"] for each in data["rows"]]


def test_a_deleted_run_is_gone(client: Client, files: RunFiles) -> None:
    with client.stream(f"/api/stream?run={files.root.name}") as events:
        next(of_kind(events, "run"))
        files.root.rename(files.root.parent.parent / "elsewhere")
        assert list(events)[-1][0] == "gone"


def test_the_list_tells_what_changed(client: Client, files: RunFiles, tmp_path: Path) -> None:
    now = client.get("/api/runs")["now"]
    append(files.metrics, row(2))
    with client.stream(f"/api/stream?since={now}") as events:
        steps_by_id: dict[str, int] = {}
        removed: list[str] = []

        def read_until(run: RunFiles, step: int) -> None:
            while steps_by_id.get(run.root.name) != step:
                data, _ = next(of_kind(events, "runs"))
                steps_by_id.update({each["id"]: each["step"] for each in data["rows"]})
                removed.extend(data["removed"])

        read_until(files, 2)  # written between the two requests
        other = make_run(tmp_path, "other", minutes=1)
        read_until(other, 20)
        other.root.rename(tmp_path.parent / f"{tmp_path.name}-gone")
        append(files.metrics, row(3))
        read_until(files, 3)
        append(files.metrics, row(4))
        read_until(files, 4)
        assert removed == [other.root.name]


def test_unknown_runs_have_no_stream(client: Client) -> None:
    assert client.request("/api/stream?run=nothing").status == 404
