"""A run's memory does not depend on how seldom it logs."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest
from train_project import run_here, write_project

from paceline.observe.metrics import read_curves
from paceline.run.monitor import Monitor
from paceline.run.step.record import StepRecord

MEASURED_AT = (80, 240, 400)


@pytest.mark.parametrize("log_every", [10, 1_000_000])
def test_memory_does_not_grow_with_the_steps(log_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_project(tmp_path / "project", f"memory_parts_{log_every}")
    bytes_at: list[int] = []
    records_at: list[int] = []
    after_step = Monitor.after_step

    def measured(self: Monitor, record: StepRecord) -> None:
        if record.step == 1:
            tracemalloc.start()
        after_step(self, record)
        if record.step in MEASURED_AT:
            gc.collect()
            bytes_at.append(tracemalloc.get_traced_memory()[0])
            records_at.append(sum(type(thing) is StepRecord for thing in gc.get_objects()))

    monkeypatch.setattr(Monitor, "after_step", measured)
    settings = [
        "epochs=100",
        f"max_steps={MEASURED_AT[-1]}",
        f"log_every={log_every}",
        "eval_every=1000000",
        "exact=false",
    ]
    try:
        files = run_here(
            config,
            tmp_path / "run",
            *[f"trainer.{setting}" for setting in settings],
            "checkpoints.save=false",
            "trainer.timeline=false",  # which keeps a second's steps until they are written
            quiet=True,
        )
    finally:
        tracemalloc.stop()
    assert max(records_at) <= 64
    # Far less than a step's record, which takes about a kilobyte. Up to 64 steps wait to be added up.
    assert bytes_at[-1] - bytes_at[0] < (MEASURED_AT[-1] - MEASURED_AT[0]) * 100
    # What is added up early is not lost: the rates are over all steps since the last line.
    metrics = read_curves(files.metrics)
    assert metrics.last_step == MEASURED_AT[-1]
    assert (metrics.last("samples_per_s") or 0) > 0
