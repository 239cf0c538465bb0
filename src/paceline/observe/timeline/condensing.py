"""Keeping a worker's file small: what is long past is summed up, what is recent stays as it was.

The newer half of the file is not touched. Older steps become stretches of so many steps each, with their microseconds
by kind, and older samples become means over longer times; both as coarse as it takes to fill a quarter of the file, and
equally coarse all over. So a run of any length keeps its whole course, and its sums stay what they were.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.observe.json_lines import to_json
from paceline.observe.timeline.layout import KINDS, end_of, parts_of

MIN_STEPS = 16
MIN_SAMPLE_S = 8.0
MAX_EVENTS = 5000
_LINE_ITEMS = 500

Stretch = list[int]
_START, _END, _TIMES = 3, 4, 5


def condense_file(path: Path, max_bytes: int) -> None:
    """Make the file at most three quarters of `max_bytes` long; who reads meanwhile sees the one file or the other."""
    lines = path.read_bytes().splitlines(keepends=True)
    first_kept = len(lines)
    kept_bytes = 0
    while first_kept and kept_bytes + len(lines[first_kept - 1]) <= max_bytes // 2:
        first_kept -= 1
        kept_bytes += len(lines[first_kept])
    sessions = list(_sessions(lines[:first_kept]))
    num_steps, sample_s = MIN_STEPS, MIN_SAMPLE_S
    while True:
        condensed = b"".join(session.encoded(num_steps, sample_s) for session in sessions)
        if len(condensed) <= max_bytes // 4 or num_steps > 1 << 40:
            break
        num_steps, sample_s = 2 * num_steps, 2 * sample_s
    beside = path.with_name(f".{path.name}.new")
    with beside.open("wb") as file:
        file.write(condensed)
        file.writelines(lines[first_kept:])
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def stretches_of(block: dict[str, Any]) -> list[Stretch]:
    """A line's steps and spans, each as a stretch of its own, after those that it has."""
    found: list[Stretch] = list(block.get("stretches", ()))
    for step in block.get("steps", ()):
        stretch = [step[0], step[0], 1, step[1], end_of(step), *[0] * len(KINDS)]
        for kind, start, end in parts_of(step):
            stretch[_TIMES + KINDS.index(kind)] += end - start
        found.append(stretch)
    for kind, step, start, duration in block.get("spans", ()):
        # What is written behind the training reaches into steps that have stretches of their own.
        stretch = [step, step, 0, start, start if kind == "writing" else start + duration, *[0] * len(KINDS)]
        stretch[_TIMES + KINDS.index(kind)] = duration
        found.append(stretch)
    return sorted(found, key=lambda stretch: stretch[_START])


def merge_stretches(stretches: Sequence[Stretch], num_steps: int) -> list[Stretch]:
    """Those that begin within the same `num_steps` steps as one. On all workers alike, so that they can be compared."""
    return [_sum(list(group)) for _, group in groupby(stretches, key=lambda stretch: stretch[0] // num_steps)]


def merge_samples(samples: Sequence[Sequence[Any]], seconds: float) -> list[list[Any]]:
    """Means over about so many seconds, weighted by the time each sample stands for."""
    groups = groupby(samples, key=lambda sample: sample[0] // int(seconds * 1e6))
    return [_mean(list(group)) for _, group in groups]


class _Session:
    """One session's lines of long ago."""

    def __init__(self) -> None:
        self.header = b""
        self.ending = b""
        self.stretches: list[Stretch] = []
        self.samples: list[list[Any]] = []
        self.events: list[list[Any]] = []

    def add(self, block: dict[str, Any]) -> None:
        self.stretches += stretches_of(block)
        self.samples += block.get("samples", ())
        self.events += block.get("events", ())

    def encoded(self, num_steps: int, sample_s: float) -> bytes:
        parts = {
            "stretches": merge_stretches(self.stretches, num_steps),
            "samples": merge_samples(self.samples, sample_s),
            "events": self.events[-MAX_EVENTS:],
        }
        lines = [
            f"{to_json({name: items[first : first + _LINE_ITEMS]})}\n".encode()
            for name, items in parts.items()
            for first in range(0, len(items), _LINE_ITEMS)
        ]
        return self.header + b"".join(lines) + self.ending


def _sessions(lines: Sequence[bytes]) -> Iterator[_Session]:
    session = _Session()
    for line in lines:
        try:
            block = json.loads(line)
        except ValueError:
            continue
        if "session" in block:
            yield session
            session = _Session()
            session.header = line
        elif "end" in block:
            session.ending = line
        else:
            session.add(block)
    yield session


def _sum(stretches: Sequence[Stretch]) -> Stretch:
    columns = list(zip(*stretches, strict=True))
    return [
        min(columns[0]),
        max(columns[1]),
        sum(columns[2]),
        min(columns[_START]),
        max(columns[_END]),
        *map(sum, columns[_TIMES:]),
    ]


def _mean(samples: Sequence[Sequence[Any]]) -> list[Any]:
    seconds = sum(sample[1] for sample in samples)
    means = []
    for column in zip(*(sample[2:] for sample in samples), strict=True):
        known = [(value, sample[1]) for value, sample in zip(column, samples, strict=True) if value is not None]
        weight = sum(part for _, part in known)
        means.append(round(sum(value * part for value, part in known) / weight, 1) if weight else None)
    return [samples[-1][0], round(seconds, 3), *means]
