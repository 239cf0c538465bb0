"""Run folders for tests of commands, made without training."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from paceline.observe.run_files import RunFiles, create_run_folder, write_json

FIRST_START = datetime(2026, 11, 15, 12, 0, 0)


def row(step: int, **values: Any) -> dict[str, Any]:
    """A line as a run of two workers writes it: a step takes half a second, an epoch has ten."""
    usual = {
        "time": step / 2,
        "epoch": (step - 1) // 10,
        "loss": 8.0 / step,
        "lr": 0.001,
        "grad_norm": 2.0,
        "samples_per_s": 80.0,
        "tokens_per_s": 4000.0,
        "shares": [6, 2],
        "waiting": [0.0, 0.125],
    }
    return {"step": step, **usual, **values}


def make_run(
    folder: Path,
    name: str = "2workers",
    rows: list[dict[str, Any]] | None = None,
    *,
    minutes: int = 0,
    status: dict[str, Any] | None = None,
) -> RunFiles:
    """A run that started `minutes` after the first and is finished, unless its status says otherwise."""
    started = FIRST_START + timedelta(minutes=minutes)
    files = create_run_folder(folder, name, started)
    lines = [row(step) for step in range(1, 21)] if rows is None else rows
    files.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    usual = {"state": "finished", "pid": 1, "process_started": None, "host": "elsewhere", "num_starts": 1}
    write_json(files.status, {**usual, "started": started.timestamp(), "total_steps": 20, **(status or {})})
    return files
