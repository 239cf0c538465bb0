"""What the API of `paceline watch` answers about run folders."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run, row
from served import Client, served
from waiting import wait_until

from paceline.cli.watch import indexes
from paceline.cli.watch import runs as runs_module
from paceline.cli.watch.curves import curves_of
from paceline.cli.watch.runs import RunEntry
from paceline.observe import curve_window
from paceline.observe.run_files import RunFiles, process_started, write_json

LANES: dict[str, Any] = {
    "lanes": {"computing": [0.7, 0.5], "data": [0.1, 0.2], "exchange": [0.1, 0.1], "rest": [0.1, 0.075]},
    "speeds": [12.0, 4.0],
    "efficiency": 0.8,
}
LIVE = {"state": "running", "pid": os.getpid(), "process_started": process_started(os.getpid())}


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "SCAN_INTERVAL_S", 0.0)
    monkeypatch.setattr(runs_module, "SCAN_INTERVAL_RATIO", 0.0)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with served(tmp_path) as client:
        yield client


def live_run(folder: Path, name: str = "live", rows: list[dict[str, Any]] | None = None, minutes: int = 9) -> RunFiles:
    lines = [row(step, **LANES) for step in range(1, 11)] if rows is None else rows
    return make_run(folder, name, lines, minutes=minutes, status={**LIVE, "host": socket.gethostname()})


def worker_status(files: RunFiles, rank: int, **values: Any) -> None:
    own = {"rank": rank, "host": socket.gethostname(), "device": "cpu", "device_name": "a CPU", "step": 13}
    process = {"pid": os.getpid(), "process_started": process_started(os.getpid()), "step_at": time.time()}
    write_json(files.ranks / f"rank-{rank}.json", {**own, **process, "memory": 1e9, "memory_limit": 8e9, **values})


def test_the_list_has_the_newest_run_first(client: Client, tmp_path: Path) -> None:
    make_run(tmp_path, "old")
    live = live_run(tmp_path)
    killed = {**LIVE, "process_started": 1, "host": socket.gethostname()}
    make_run(tmp_path, "killed", minutes=3, status=killed)
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    found = client.get("/api/runs")
    assert [run["state"] for run in found["runs"]] == ["live", "crashed", "finished"]
    first = found["runs"][0]
    assert first["id"] == first["name"] == live.root.name
    assert (first["config_name"], first["step"], first["total_steps"], first["loss"]) == ("live", 10, 20, 0.8)
    assert (first["num_workers"], first["evaluation"], first["ended"]) == (2, [], None)
    assert first["eta_s"] == pytest.approx(0.5 * 10)
    assert found["runs"][2]["eta_s"] is None
    assert found["folder"] == str(tmp_path)


def test_the_list_follows_changes_and_searches_configurations(client: Client, tmp_path: Path) -> None:
    first = make_run(tmp_path, "a")
    first.config.write_text("trainer:\n  learning_rate: 0.25\n")
    assert len(client.get("/api/runs")["runs"]) == 1
    make_run(tmp_path, "b", minutes=1, rows=[row(1), {"step": 1, "eval": {"loss": 2.5}}])
    with first.metrics.open("a") as file:
        file.write(json.dumps(row(21)) + "\n")
    (newest, oldest) = client.get("/api/runs")["runs"]
    assert (newest["evaluation"], oldest["step"]) == ([["eval/loss", 2.5]], 21)
    assert [run["name"][0] for run in client.get("/api/runs?search=LEARNING_rate+0.25")["runs"]] == ["a"]
    assert client.get("/api/runs?search=nothing")["runs"] == []


def test_a_run_that_has_just_begun_is_found(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "SCAN_INTERVAL_S", 3600.0)
    assert client.get("/api/runs")["runs"] == []  # the folder was read just now
    assert client.get(f"/api/runs/{make_run(tmp_path, 'new').root.name}")["step"] == 20


def test_a_resume_is_not_a_metric(client: Client, tmp_path: Path) -> None:
    files = make_run(tmp_path, "resumed", [row(1), {"resumed_from": 1}, row(2), row(3)])
    names = client.get(f"/api/runs/{files.root.name}")["names"]
    assert "loss" in names
    assert "resumed_from" not in names


def test_one_run_shows_its_workers(client: Client, tmp_path: Path) -> None:
    files = live_run(tmp_path)
    worker_status(files, 0, gpu_memory=5e9, gpu_memory_limit=6e9)
    worker_status(files, 1, process_started=1)
    found = client.get(f"/api/runs/{files.root.name}")
    assert (found["step"], found["efficiency"], found["pid"]) == (13, 0.8, os.getpid())
    assert abs(found["last_step_at"] - time.time()) < 600
    assert {"loss", "lanes/computing/1", "waiting/0"} <= set(found["names"])
    first, second = found["workers"]
    assert (first["host"], first["device_name"], first["memory_bytes"]) == (socket.gethostname(), "a CPU", 1e9)
    assert (first["device_memory_bytes"], first["device_memory_limit_bytes"]) == (5e9, 6e9)
    assert (first["share"], first["num_micro_batches"], first["speed"]) == (0.75, 6, 12.0)
    assert first["lanes"] == {"computing": 0.7, "data": 0.1, "waiting": 0.0, "exchange": 0.1, "rest": 0.1}
    assert math.isclose(sum(second["lanes"].values()), 1.0)
    assert (first["is_alive"], second["is_alive"]) == (True, False)
    assert isinstance(found["verdicts"], list)


def test_runs_of_older_versions_have_fewer_facts(client: Client, tmp_path: Path) -> None:
    files = make_run(tmp_path)
    files.status.unlink()
    found = client.get(f"/api/runs/{files.root.name}")
    assert (found["state"], found["started"]) == ("unknown", None)
    assert found["workers"][1]["lanes"] == dict.fromkeys(("computing", "data", "exchange", "rest")) | {"waiting": 0.125}
    files.metrics.write_bytes(b'{"step": 1, "shares": 3, "lanes": [1], "waiting": {"a": 1}, "eval": 5}\nno json\n')
    (files.ranks / "rank-0.json").write_text("[1]")
    odd = client.get(f"/api/runs/{files.root.name}")
    assert (odd["step"], odd["workers"][0]["lanes"], odd["evaluation"]) == (1, None, [])


def test_curves(client: Client, tmp_path: Path) -> None:
    rows = [row(step) for step in range(1, 21)] + [{"step": 20, "eval": {"loss": "NaN"}}]
    files = make_run(tmp_path, rows=rows)
    path = f"/api/runs/{files.root.name}/metrics"
    found = client.get(f"{path}?name=loss&name=eval&from=4&to=20&points=16")
    assert [each["name"] for each in found["series"]] == ["loss", "eval/loss"]
    assert (found["from"], found["to"], found["first_step"], found["last_step"]) == (4, 20, 1, 20)
    assert (found["series"][0]["steps"][0], found["series"][0]["values"][0]) == (4, 2.0)
    assert found["series"][1]["values"] == ["NaN"]
    assert (found["is_sampled"], found["offset"]) == (False, files.metrics.stat().st_size)
    everything = client.get(path)
    assert {"loss", "time", "waiting/1"} <= {each["name"] for each in everything["series"]}
    by_time = client.get(f"{path}?name=loss&x=time")["series"]
    assert [each["name"] for each in by_time] == ["loss"]
    assert by_time[0]["x"] == [step / 2 for step in by_time[0]["steps"]]
    by_epoch = client.get(f"{path}?name=loss&x=epoch")["series"][0]
    assert (by_epoch["x"][9], by_epoch["x"][19]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("query", "message"),
    [("points=x", "points='x': choose an integer >= 0"), ("x=loss", "x='loss': choose from step, epoch, time")],
)
def test_wrong_questions_are_refused(client: Client, tmp_path: Path, query: str, message: str) -> None:
    files = make_run(tmp_path)
    reply = client.request(f"/api/runs/{files.root.name}/metrics?{query}")
    assert (reply.status, reply.json) == (400, {"error": message})


def test_events_in_words(client: Client, tmp_path: Path) -> None:
    files = make_run(tmp_path)
    world = {"generation": 2, "size": 1, "left": [1], "joined": [], "reason": "killed by signal 9", "seconds": 0.41}
    happened = [
        ("plan", {"shares": [6, 2], "before": [4, 4]}),
        ("save", {"folder": "/x/checkpoints/step-00000100"}),
        ("world", world),
        ("world", {"size": 3, "joined": [1, 2]}),
        ("drift", {"drift": 0.0213, "every": 4}),
        ("capture", {"what": "step", "number": 1}),
        ("capture", {"what": "micro-batch", "reason": "its shapes change"}),
        ("new <b>", {"a": 1}),
        ("plan", {"shares": 3}),
    ]
    lines = [{"time": 5.0, "step": i, "event": name, "details": details} for i, (name, details) in enumerate(happened)]
    files.events.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 3}\n')
    found = client.get(f"/api/runs/{files.root.name}/events")
    assert [event["text"] for event in found["events"]] == [
        "shares 6:2, before 4:4",
        "saved step-00000100",
        "worker 1 left (killed by signal 9); 1 worker continues after 0.4 s",
        "workers 1, 2 joined; 3 workers continue",
        "replicas drift apart by 0.0213: averaging every 4 steps",
        "captured a CUDA graph of a step",
        "no CUDA graph of a micro-batch: its shapes change",
        "new <b>: a 1",
        "plan: shares 3",
    ]
    assert found["events"][2]["details"] == world
    assert [e["step"] for e in client.get(f"/api/runs/{files.root.name}/events?limit=2")["events"]] == [7, 8]


def test_the_log_shows_the_last_lines_by_rank(client: Client, tmp_path: Path) -> None:
    files = make_run(tmp_path)
    (files.ranks / "rank-1.err").write_bytes(b"first\nsecond\n\x1b[31mred\r\nbar 1\rbar 2\n")
    (files.ranks / "rank-0.out").write_text("x\n" * 50_000)
    path = f"/api/runs/{files.root.name}/log"
    (err,) = client.get(f"{path}?rank=1&stream=err&lines=3")["files"]
    assert (err["rank"], err["stream"], err["is_cut"]) == (1, "err", True)
    assert err["lines"] == ["second", "\\x1b[31mred", "bar 2"]
    out, again = client.get(path)["files"]
    assert (out["rank"], out["is_cut"], len(out["lines"]), again["rank"]) == (0, True, 100, 1)


def test_what_was_planned(client: Client, tmp_path: Path) -> None:
    files = make_run(tmp_path, "planned")
    one = f"/api/runs/{files.root.name}"
    assert client.get(one)["plan"] is None
    good = {"workers": "2xA", "strategy": "gradients", "samples_per_s": 10.0, "efficiency": 0.5, "limit": "exchange"}
    write_json(files.plan, {"advice": "Use 2xA.", "alternatives": [good, "odd", {"workers": 7, "epoch_s": "long"}]})
    unknown = {"epoch_s": None, "epoch_cost": None}
    nothing = dict.fromkeys(good)
    assert client.get(one)["plan"] == {"advice": "Use 2xA.", "alternatives": [good | unknown, nothing | unknown]}
    files.plan.write_text("[]")
    assert client.get(one)["plan"] is None


def test_checkpoints_with_age_and_size(client: Client, tmp_path: Path) -> None:
    files = make_run(tmp_path)
    for step in (100, 200, 300):
        folder = files.checkpoints / f"step-{step:08}"
        folder.mkdir()
        (folder / "weights.safetensors").write_bytes(bytes(1000))
        if step < 300:
            manifest = {"created": "2026-11-15T12:00:00+00:00", "metrics": {"eval/loss": 1.5}}
            (folder / "manifest.json").write_text(json.dumps(manifest))
    newest, oldest = client.get(f"/api/runs/{files.root.name}/checkpoints")["checkpoints"]
    assert (newest["step"], oldest["step"], newest["num_files"]) == (200, 100, 2)
    assert (newest["saved"], newest["metrics"]) == (1794744000.0, [["eval/loss", 1.5]])
    assert newest["num_bytes"] > 1000


def test_configurations_and_their_parents(client: Client, tmp_path: Path) -> None:
    first, second, other = (make_run(tmp_path, name, minutes=i) for i, name in enumerate(("a", "a", "b")))
    first.config.write_text("trainer: {seed: 0, epochs: 2}\nmodel: x\n")
    second.config.write_text("trainer: {seed: 1, epochs: 2}\n")
    named = tmp_path / first.root.name / "checkpoints" / "step-00000001"
    other.config.write_text(f"checkpoints: {{resume: {named}}}\n")
    found = client.get(f"/api/runs/{second.root.name}/config")
    assert found["entries"] == [["trainer.seed", 1], ["trainer.epochs", 2]]
    assert found["parent"] == {
        "id": first.root.name,
        "name": first.root.name,
        "why": "the previous run of this config",
    }
    assert found["difference"] == [{"key": "trainer.seed", "own": 1, "parent": 0}, {"key": "model", "parent": "x"}]
    assert client.get(f"/api/runs/{first.root.name}/config")["parent"] is None
    assert client.get(f"/api/runs/{other.root.name}/config")["parent"]["why"] == "started from its checkpoint"
    compared = client.get(f"/api/compare?run={first.root.name}&run={second.root.name}")
    assert compared["differences"] == [
        {"key": "trainer.seed", "values": [0, 1]},
        {"key": "model", "values": ["x", None]},
    ]


@pytest.mark.parametrize(
    "content",
    [b"a: [", b"\xff\xfe", b"- 1", b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", b"a: &a {b: *a}\n", b"[" * 200_000],
)
def test_odd_configurations_do_no_harm(client: Client, tmp_path: Path, content: bytes) -> None:
    files = make_run(tmp_path)
    files.config.write_bytes(content)
    assert client.get(f"/api/runs/{files.root.name}/config")["difference"] == []


def test_prometheus(client: Client, tmp_path: Path) -> None:
    files = live_run(tmp_path, 'live"\\', rows=[row(3, loss=math.nan, **LANES), {"step": 3, "eval": {"loss": 1.5}}])
    worker_status(files, 0)
    name = files.root.name.replace("\\", "\\\\")
    reply = client.request("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = reply.body.decode().splitlines()
    for line in (
        "# TYPE paceline_step gauge",
        f'paceline_step{{run="{name}"}} 13',
        f'paceline_live{{run="{name}"}} 1',
        f'paceline_loss{{run="{name}"}} NaN',
        f'paceline_metric{{run="{name}",name="eval/loss"}} 1.5',
        f'paceline_worker_time{{run="{name}",worker="1",lane="data"}} 0.2',
        f'paceline_worker_memory_bytes{{run="{name}",worker="0"}} 1000000000.0',
    ):
        assert line in lines, line


def test_a_run_that_is_not_running_cannot_be_controlled(client: Client, tmp_path: Path) -> None:
    files = make_run(tmp_path)
    reply = client.post(f"/api/runs/{files.root.name}/stop")
    assert (reply.status, reply.json) == (409, {"error": f"{files.root.name} is not running: finished"})
    silent = live_run(tmp_path)
    reply = client.post(f"/api/runs/{silent.root.name}/save")
    assert reply.status == 502
    assert "once their workers have started" in reply.json["error"]


def test_a_run_that_has_not_started_its_workers_is_not_aborted(client: Client, tmp_path: Path) -> None:
    reply = client.post(f"/api/runs/{live_run(tmp_path).root.name}/abort")
    assert reply.status == 502
    assert "once their workers have started" in reply.json["error"]


def test_the_newest_evaluation_is_shown_while_the_run_goes_on(client: Client, tmp_path: Path) -> None:
    files = live_run(tmp_path, rows=[row(1), {"step": 1, "eval": {"loss": 2.5}}])
    assert client.get("/api/runs")["runs"][0]["evaluation"] == [["eval/loss", 2.5]]

    def append(*lines: dict[str, Any]) -> Any:
        with files.metrics.open("a") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)
        return client.get("/api/runs")["runs"][0]["evaluation"]

    assert append(*(row(step, **LANES) for step in range(2, 200))) == [["eval/loss", 2.5]]
    assert append({"resumed_from": 0}) == []


def test_workers_of_a_run_that_starts_again_have_not_left(client: Client, tmp_path: Path) -> None:
    files = live_run(tmp_path)
    for rank in (0, 1):
        worker_status(files, rank, process_started=1)
        os.utime(files.worker(rank), (1e9, 1e9))
    workers = client.get(f"/api/runs/{files.root.name}")["workers"]
    assert [(worker["is_alive"], worker["seen"]) for worker in workers] == [(True, None), (True, None)]


def test_lines_of_a_thousand_workers(client: Client, tmp_path: Path) -> None:
    many = {"shares": 1000 * [4], "waiting": 1000 * [0.1234], "speeds": 1000 * [12.5], "note": 20_000 * "x"}
    files = live_run(tmp_path, rows=[row(step, **many) for step in (1, 2)])
    found = client.get(f"/api/runs/{files.root.name}")
    assert (found["loss"], found["num_workers"], len(found["workers"])) == (4.0, 1000, 1000)


def test_a_thousand_runs(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(1000):
        make_run(tmp_path, f"run{i}", [row(1)])
    assert len(client.get("/api/runs")["runs"]) == 1000
    read = []
    for name in ("read_status", "read_bytes", "document"):
        monkeypatch.setattr(runs_module, name, lambda path, *_, **__: read.append(path))
    assert len(client.get("/api/runs")["runs"]) == 1000
    assert read == [], "only files that changed are read again"


@pytest.mark.parametrize("max_behind_bytes", [0, 1 << 20])
def test_a_spike_that_a_sample_misses_is_found(
    max_behind_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the background, or at once where a file is short enough."""
    monkeypatch.setattr(curve_window, "EXACT_BYTES", 20_000)
    monkeypatch.setattr(curve_window, "SAMPLE_BYTES", 10_000)
    monkeypatch.setattr(curve_window, "TAIL_BYTES", 1000)
    monkeypatch.setattr(indexes, "MAX_BEHIND_BYTES", max_behind_bytes)
    rows = [row(step, loss=99.0 if step == 1234 else 1.0) for step in range(1, 3001)]
    files = make_run(tmp_path, "long", rows)
    path = f"/api/runs/{files.root.name}/metrics?name=loss"

    def extremes(more: str = "") -> list[tuple[int, float]]:
        found = client.get(path + more)["series"][0]
        return [point for point in zip(found["steps"], found["values"], strict=True) if point[1] != 1.0]

    with served(tmp_path) as client:
        assert client.get(path)["is_sampled"] is (max_behind_bytes == 0)
        wait_until(lambda: not client.get(path)["is_sampled"])
        assert extremes() == extremes("&points=64") == extremes("&from=1100&to=2900") == [(1234, 99.0)]
        assert extremes("&from=1300&to=2900") == []
        monkeypatch.setattr(indexes, "MAX_BEHIND_BYTES", 1 << 20)
        with files.metrics.open("a") as file:
            file.writelines(
                f"{json.dumps(row(step, loss=-5.0 if step == 3333 else 1.0))}\n" for step in range(3001, 5001)
            )
        assert extremes() == [(1234, 99.0), (3333, -5.0)]


def test_rare_metrics_and_superseded_lines_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample misses the former, and draws the latter."""
    monkeypatch.setattr(curve_window, "EXACT_BYTES", 20_000)
    monkeypatch.setattr(curve_window, "SAMPLE_BYTES", 10_000)
    monkeypatch.setattr(curve_window, "TAIL_BYTES", 1000)
    first, again = ([row(step, loss=loss) for step in range(1000, 1040)] for loss in (99.0, 1.0))
    before, after = ([row(step, loss=1.0) for step in steps] for steps in (range(1, 1000), range(1040, 3001)))
    rows = [*before, *first, {"resumed_from": 999}, *again, {"step": 1037, "eval": {"loss": 5.0}}, *after]
    files = make_run(tmp_path, "long", rows)
    known = indexes.Indexes()
    entry = RunEntry(files.root)
    found = curves_of(entry, ["loss", "eval"], points=200, indexes=known)
    loss, evaluation = found["series"]
    assert (set(loss["values"]), evaluation["values"]) == ({1.0}, [5.0])
    assert (evaluation["is_thinned"], found["is_sampled"]) == (False, False)
    assert "eval/loss" in curves_of(entry, ["loss"], points=200, indexes=known)["names"]
