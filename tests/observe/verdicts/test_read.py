"""Reading a run's folder: the ends of its files, without what was superseded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import time
from typing import Any

import pytest
from timeline_files import write_lines

from paceline.core.events import Event
from paceline.observe.run_files import RunFiles, prepare_run_folder, write_json
from paceline.observe.verdicts.read import EvidenceReader, read_evidence

NOW = time()


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return prepare_run_folder(tmp_path / "run")


def line(step: int, loss: float = 1.0) -> dict[str, float]:
    return {"step": step, "time": float(step), "loss": loss}


def append_lines(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)


def test_lines_before_a_resume_are_superseded(files: RunFiles) -> None:
    write_lines(files.metrics, line(10), line(20), line(30), {"resumed_from": 10}, line(20, 2.0))
    assert [(each.step, each.loss) for each in read_evidence(files).lines] == [(10, 1.0), (20, 2.0)]


def test_of_a_long_file_the_first_line_and_the_end_are_read(files: RunFiles) -> None:
    write_lines(files.metrics, line(1, 7.0), *(line(step) for step in range(2, 5000)))
    evidence = read_evidence(files)
    assert evidence.first_loss == 7.0
    assert evidence.lines[-1].step == 4999
    assert len(evidence.lines) < 2500
    assert not evidence.is_whole
    write_lines(files.metrics, line(5, 7.0), line(10))
    assert read_evidence(files).is_whole


def test_what_is_new_is_read_each_time(files: RunFiles) -> None:
    """As a whole file would be: incomplete lines, a resume, another file of that name."""
    reader = EvidenceReader(files)
    assert reader.read().lines == []
    write_lines(files.metrics, line(10, 5.0), line(20))
    assert reader.read(NOW) == read_evidence(files, NOW)
    with files.metrics.open("a") as file:
        file.write(json.dumps(line(30))[:9])
        file.flush()
        assert [each.step for each in reader.read().lines] == [10, 20]
        file.write(json.dumps(line(30))[9:] + "\n" + json.dumps({"resumed_from": 20}) + "\n")
    append_lines(files.metrics, {"step": 25, "time": 40.0, "loss": 2.0})
    append_lines(files.events, {"step": 25, "event": "world", "details": {"size": 1}})
    found = reader.read()
    assert [(each.step, each.since_step, each.seconds) for each in found.lines][1:] == [(20, 10, 10.0), (25, 20, 20.0)]
    assert (found.is_whole, found.first_loss, found.num_workers) == (True, 5.0, 1)
    assert reader.read(NOW) == read_evidence(files, NOW)
    files.metrics.rename(files.metrics.with_suffix(".old"))
    write_lines(files.metrics, line(1, 7.0))
    assert [(each.step, each.loss) for each in reader.read().lines] == [(1, 7.0)]
    assert reader.read().first_loss == 7.0


def test_an_evaluation_is_not_a_line_of_its_own(files: RunFiles) -> None:
    write_lines(files.metrics, line(10), {"step": 10, "time": 14.0, "eval": {"loss": 1.0}}, line(20))
    assert [(each.step, each.seconds) for each in read_evidence(files).lines] == [(10, 0.0), (20, 10.0)]


def test_facts_come_from_the_status_files_of_the_workers(files: RunFiles) -> None:
    status = {"rank": 0, "host": "a", "device": "cpu", "cpu": 50.0, "host_memory": 4e9, "memory_limit": 8e9}
    write_json(files.worker(0), status)
    write_json(
        files.worker(2), {"rank": 2, "host": "b", "device": "cuda:1", "gpu_memory": 3e9, "gpu_memory_limit": 4e9}
    )
    for rank, age_s in ((0, 20), (2, 2)):
        os.utime(files.worker(rank), (NOW - age_s, NOW - age_s))
    write_json(files.environment, {"host": {"name": "a", "cores": 8}})
    evidence = read_evidence(files, NOW)
    first, missing, last = evidence.workers
    assert (first.host, first.device, first.cpu, first.gpu_memory_bytes) == ("a", "cpu", 50.0, None)
    assert (last.host, last.device, last.gpu_memory_bytes, last.gpu_memory_total_bytes) == ("b", "cuda:1", 3e9, 4e9)
    assert [worker.silent_s for worker in (first, missing, last)] == [pytest.approx(20), None, pytest.approx(2)]
    assert (evidence.cores, evidence.host_memory_bytes, evidence.host_memory_total_bytes) == (8, 4e9, 8e9)


def test_only_the_name_of_a_status_file_says_whose_it_is(files: RunFiles) -> None:
    write_json(files.worker(0), {"rank": 1 << 62, "host": "a"})
    for name in ("rank-9999999.json", "rank-x.json"):
        write_json(files.ranks / name, {"rank": 1})
    assert [worker.host for worker in read_evidence(files).workers] == ["a"]


def test_a_worker_that_left_is_not_forgotten_among_other_events(files: RunFiles) -> None:
    reader = EvidenceReader(files)
    append_lines(files.events, {"step": 5, "event": "world", "details": {"size": 1, "left": [1], "joined": []}})
    reader.read()
    append_lines(files.events, *({"step": step, "event": "plan", "details": {}} for step in range(6, 700)))
    assert reader.read().world_event == Event("world", 5, {"size": 1, "left": [1], "joined": []})


def test_a_pipe_is_not_read(files: RunFiles) -> None:
    for path in (files.metrics, files.events, files.config):
        os.mkfifo(path)
    assert (read_evidence(files).lines, read_evidence(files).settings) == ([], {})


def test_settings_are_read_by_flat_name(files: RunFiles) -> None:
    files.config.write_text("trainer: {readers: 2, strategy: {kind: cadence}}\nworkers: 3\n")
    settings = read_evidence(files).settings
    assert settings == {"trainer.readers": 2, "trainer.strategy.kind": "cadence", "workers": 3}


def test_an_empty_folder(files: RunFiles) -> None:
    evidence = read_evidence(files)
    assert (evidence.lines, evidence.workers, evidence.state) == ([], [], "unknown")
    files.events.write_text(json.dumps({"step": 1, "event": "world", "details": 3}) + "\n")
    assert read_evidence(files).world_event == Event("world", 1, {})


def test_a_run_that_starts_again_has_not_been_silent_since_its_end(files: RunFiles) -> None:
    write_lines(files.metrics, *(line(step) for step in range(1, 9)))
    write_json(files.worker(0), {"host": "a"})
    status = {"state": "running", "pid": 1, "process_started": 1, "host": "a", "started": 1.0, "num_starts": 1}
    write_json(files.status, status)
    for path, age_s in ((files.metrics, 9000), (files.worker(0), 9000), (files.status, 2)):
        os.utime(path, (NOW - age_s, NOW - age_s))
    reader = EvidenceReader(files)

    def found() -> tuple[Any, ...]:
        evidence = reader.read(NOW)
        return evidence.silent_s, evidence.is_starting, evidence.workers[0].silent_s

    assert found() == (pytest.approx(2.0), True, None)
    append_lines(files.metrics, {"resumed_from": 8}, line(9), line(10))
    os.utime(files.metrics, (NOW - 1, NOW - 1))
    write_json(files.worker(0), {"host": "a"})
    os.utime(files.worker(0), (NOW - 1, NOW - 1))
    assert found() == (pytest.approx(1.0), True, pytest.approx(1.0))
    append_lines(files.metrics, line(11))
    assert not reader.read(NOW).is_starting
