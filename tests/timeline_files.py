"""Timelines for tests, written by hand: every number in them is chosen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def session(rank: int = 0, size: int = 1, *, host: str = "a", unix_time: float = 1000.0) -> dict[str, Any]:
    return {
        "session": {
            "version": 2,
            "rank": rank,
            "size": size,
            "host": host,
            "device": "cpu",
            "pid": 1,
            "unix_time": unix_time,
        }
    }


def step(
    number: int, start: int, *, data: int = 0, compute: int = 100, sync: int = 0, optimizer: int = 10
) -> list[int]:
    """A step of one pass."""
    return [number, start, 0, 0, data, compute, 0, sync, optimizer, 0]


def sample(time: int, cpu: float, seconds: float = 1.0) -> list[Any]:
    return [time, seconds, {"cpu": cpu}]


def run_of_two(folder: Path, num_steps: int = 3) -> Path:
    """Rank 0 takes 100 ms a step, rank 1 300 ms; the exchange takes 20 ms, the optimizer 30 ms."""
    for rank, compute in enumerate((100_000, 300_000)):
        steps = [
            step(n + 1, 50_000 + 360_000 * n, data=10_000, compute=compute, sync=320_000 - compute, optimizer=30_000)
            for n in range(num_steps)
        ]
        end = 50_000 + 360_000 * num_steps
        write_lines(
            folder / "timeline" / f"rank-{rank}.jsonl",
            session(rank, 2),
            {"steps": steps, "samples": [sample(end, 50.0 + rank)], "events": [["save", 2, 700_000, {"folder": "x"}]]},
            {"end": end},
        )
    return folder


def rows(first: int, count: int, start: int, duration: int = 200) -> Sequence[list[int]]:
    return [step(first + i, start + duration * i, compute=100 + i % 7) for i in range(count)]
