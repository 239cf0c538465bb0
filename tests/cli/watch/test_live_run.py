"""A real run of two workers under `paceline watch`: followed, saved and stopped."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from live_page import training
from served import Client, served
from waiting import wait_until


def test_a_run_is_followed_and_controlled(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with served(tmp_path / "runs") as client:
        with training(tmp_path) as started:
            run_id = started().root.name
            one = f"/api/runs/{run_id}"
            follows(client, run_id)
            wait_until(lambda: client.get(one)["workers"][1]["lanes"] is not None)
            found = client.get(one)
            assert (found["state"], found["num_workers"], found["total_steps"]) == ("live", 2, 100_000)
            for worker in found["workers"]:
                assert worker["is_alive"]
                assert (worker["host"], worker["device"]) == (socket.gethostname(), "cpu")
                assert 0 < worker["memory_bytes"] < worker["memory_limit_bytes"]
                assert abs(sum(worker["lanes"].values()) - 1) < 0.01
            assert sum(worker["share"] for worker in found["workers"]) == pytest.approx(1)
            assert client.post(f"{one}/save").json["ok"]
            wait_until(lambda: client.get(f"{one}/checkpoints")["checkpoints"])
            assert [event["event"] for event in client.get(f"{one}/events")["events"]][-1] == "save"
            assert client.post(f"{one}/stop").json["step"] > 0
            wait_until(lambda: client.get(one)["state"] == "stopped")
        stopped = client.get(one)
        assert not any(worker["is_alive"] for worker in stopped["workers"])
        assert client.post(f"{one}/stop").status == 409


def follows(client: Client, run_id: str) -> None:
    """Each logged step arrives once, in order."""
    offset = 0
    steps: list[int] = []
    with client.stream(f"/api/stream?run={run_id}&metrics={offset}") as events:
        for name, data, _ in events:
            if name == "metrics":
                steps += [record["step"] for record in map(json.loads, data["lines"]) if "step" in record]
            if len(steps) > 5:
                break
    assert steps == sorted(set(steps))
    assert steps[0] == 1
