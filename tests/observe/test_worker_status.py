"""A worker's status file: content, refreshing, and failures that do not end the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from waiting import wait_until

from paceline.core.world import World
from paceline.observe import worker_status
from paceline.observe.run_files import RunFiles, prepare_run_folder, process_started, read_json
from paceline.observe.worker_status import WorkerStatus


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_status, "INTERVAL_S", 0.01)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return prepare_run_folder(tmp_path)


def test_the_file_has_device_host_memory_and_the_newest_step(files: RunFiles) -> None:
    world, steps = World(1, 2, host="b", device=torch.device("cpu")), [0]
    path = files.worker(1)
    with WorkerStatus(files, lambda: world, lambda: steps[0]):
        wait_until(path.is_file)
        steps[0] = 7
        wait_until(lambda: read_json(path)["step"] == 7)
        found = read_json(path)
        steps[0] = 8
    assert (found["rank"], found["host"], found["device"], found["pid"]) == (1, "b", "cpu", os.getpid())
    assert found["process_started"] == process_started(os.getpid())
    assert 0 < found["memory"] < found["memory_limit"]
    assert 0 < found["peak_bytes"] < found["memory_limit"]
    assert found["device_name"]
    assert read_json(path)["step"] == 8, "the end is recorded too"


def test_a_worker_with_another_rank_removes_its_old_file(files: RunFiles) -> None:
    worlds = [World(2, 3)]
    with WorkerStatus(files, lambda: worlds[-1], lambda: 0):
        wait_until(files.worker(2).is_file)
        worlds.append(World(1, 2))
        wait_until(files.worker(1).is_file)
    assert [path.name for path in files.ranks.iterdir()] == ["rank-1.json"]


def test_a_folder_that_cannot_be_written_is_one_warning_and_tried_again(tmp_path: Path) -> None:
    files, num_written = RunFiles(tmp_path / "later"), [0]

    def step() -> int:
        num_written[0] += 1
        return 0

    with pytest.warns(UserWarning, match="cannot be written, training continues") as warned:  # noqa: PT031, SIM117
        with WorkerStatus(files, World, step):
            wait_until(lambda: num_written[0] > 3)
            files.ranks.mkdir(parents=True)
            wait_until(files.worker(0).is_file)
    assert len(warned) == 1
