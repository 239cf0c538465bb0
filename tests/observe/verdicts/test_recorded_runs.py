"""Verdicts on recorded runs: the fault that was injected is what they name. See record.py."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from time import time

import pytest

from paceline.observe.run_files import RunFiles
from paceline.observe.verdicts.diagnose import diagnose
from paceline.observe.verdicts.evidence import Evidence
from paceline.observe.verdicts.read import read_evidence

HERE = Path(__file__).parent
# The run, the kind of its first verdict, the worker it names, its sentence, and the settings to change.
RECORDED = [
    ("healthy", "nothing wrong", None, r"nothing wrong at \S+ samples/s: computing 9\d%, waiting for data 1%, .*", []),
    ("one_worker", "nothing wrong", None, r"nothing wrong at 243 samples/s: computing 96%, .*", []),
    (
        "slow_worker",
        "slow worker",
        1,
        r"worker 1 is 3\.2 times slower than the others since step 55; it gets 9% of the work",
        [],
    ),
    ("slow_reader", "data-bound", None, r"the workers wait for data 63% of the time", ["trainer.readers"]),
    (
        "one_slow_reader",
        "data-bound",
        1,
        r"worker 1 is 3\.2 times slower than the others since the start; it gets 25% of the work; it waits for data "
        r"72% of its time",
        ["trainer.readers"],
    ),
    (
        "exchange",
        "exchange-bound",
        None,
        r"exchanging gradients takes 40% of the time",
        ["trainer.overlap", "trainer.global_batch", "trainer.strategy"],
    ),
    (
        "diverging",
        "diverging",
        None,
        r"the loss diverges: it is 3\.143e\+04, 29232\.7 times its minimum; it was 1\.075 at step 18",
        ["optimizer.arguments.lr", "trainer.max_grad_norm"],
    ),
    (
        "overflowed",
        "diverging",
        None,
        r"the loss diverged and the run failed: WorkerError: rank 1 failed: NonFiniteError: loss is inf at step 137.*",
        ["optimizer.arguments.lr", "trainer.max_grad_norm"],
    ),
    (
        "stopped_worker",
        "stalled",
        1,
        r"worker 1 has stalled, its process is stopped or blocked: no step for 8\.\d s after step \d+",
        [],
    ),
]


def recorded(name: str, folder: Path) -> Evidence:
    """As it was when it was recorded: the files have the age that they had."""
    root = folder / name
    shutil.copytree(HERE / name, root)
    now = time()
    for path, age_s in json.loads((root / "ages_s.json").read_text()).items():
        os.utime(root / path, (now - age_s, now - age_s))
    return read_evidence(RunFiles(root), now)


@pytest.mark.parametrize(("name", "kind", "rank", "text", "settings"), RECORDED, ids=[row[0] for row in RECORDED])
def test_the_first_verdict_names_the_fault(
    name: str, kind: str, rank: int | None, text: str, settings: list[str], tmp_path: Path
) -> None:
    verdict = diagnose(recorded(name, tmp_path))[0]
    assert (verdict.kind, verdict.rank) == (kind, rank), verdict
    assert re.fullmatch(text, verdict.text), verdict.text
    assert [change.setting for change in verdict.changes if change.setting] == settings


def test_every_recording_is_judged() -> None:
    assert {path.parent.name for path in HERE.glob("*/ages_s.json")} == {row[0] for row in RECORDED}


@pytest.mark.parametrize("name", ["slow_worker", "one_slow_reader"])
def test_without_lanes_and_speeds_a_slow_worker_is_still_named(name: str, tmp_path: Path) -> None:
    """Runs of earlier versions logged shares and waiting only."""
    shutil.copytree(HERE / name, tmp_path / name)
    path = tmp_path / name / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["lanes"], line["speeds"]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    verdict = diagnose(read_evidence(RunFiles(tmp_path / name)))[0]
    assert (verdict.kind, verdict.rank) == ("slow worker", 1)
