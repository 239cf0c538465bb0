"""Reads the evidence from a run's folder: only the ends of its files, so it takes milliseconds for any run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any

from paceline.core.events import Event
from paceline.observe.json_lines import LineReader, first_line, is_count, number_or_none
from paceline.observe.run_files import (
    RunFiles,
    State,
    Status,
    read_mapping,
    read_settings,
    read_status,
    state_of,
    unchanged,
)
from paceline.observe.verdicts.evidence import MIN_LINES, Evidence, Lines, WorkerFacts

_STATUS_FILE = re.compile(r"rank-(\d{1,6})\.json")
# The content of a worker's status file, and when it was written, as Unix time.
WorkerFile = tuple[dict[str, Any], float]


def read_evidence(files: RunFiles, now: float | None = None) -> Evidence:
    """now: Unix time; the current time by default."""
    return EvidenceReader(files).read(now)


class EvidenceReader:
    """Reads a run's evidence repeatedly: after the first time, only new lines of its files."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._metrics, self._events = _Growing(files.metrics), _Growing(files.events)
        self._lines, self._head = Lines(), Lines()
        self._world_event: Event | None = None

    def read(
        self,
        now: float | None = None,
        *,
        state: State | None = None,
        status: Status | None = None,
        workers: Mapping[int, WorkerFile] | None = None,
    ) -> Evidence:
        """now: Unix time; the current time by default. Other arguments that the caller knows need not be read."""
        files, now = self._files, time() if now is None else now
        status = status or read_status(files)
        self._read_lines()
        started, written = (_changed(path) for path in (files.status, files.metrics))
        host = _mapping(unchanged(read_mapping, files.environment).get("host"))
        found = worker_files(files) if workers is None else workers
        leader = found[0][0] if 0 in found else {}
        lines, head = self._lines.newest(), self._head.newest()
        return Evidence(
            state=state or state_of(files, status),
            reason=status.reason if status else None,
            lines=lines,
            is_whole=bool(lines and head) and lines[0].step == head[0].step,
            first_loss=head[0].loss if head else None,
            world_event=self._world_event,
            workers=[
                _facts(*found[rank], now, started) if rank in found else WorkerFacts()
                for rank in range(max(found, default=-1) + 1)
            ],
            silent_s=max(now - max(written, started), 0.0) if written and status else None,
            is_starting=started > written or self._lines.num_since_resume < MIN_LINES,
            settings=unchanged(read_settings, files.config),
            host_memory_bytes=number_or_none(leader.get("host_memory")),
            host_memory_total_bytes=number_or_none(leader.get("memory_limit")),
            cores=cores if is_count(cores := host.get("cores")) else None,
        )

    def _read_lines(self) -> None:
        records, is_other = self._metrics.read()
        if is_other:
            self._lines = Lines()
        if is_other or not self._head.newest():
            self._head = Lines(_head(self._files.metrics))
        self._lines.add(records)
        records, is_other = self._events.read()
        if is_other:
            self._world_event = None
        for record in records:
            if record.get("event") == "world" and is_count(record.get("step")):
                self._world_event = Event("world", record["step"], _mapping(record.get("details")))


class _Growing:
    """A file of JSON lines, from near its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader: LineReader | None = None

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The new records, and whether the file is another one than before."""
        try:
            if not self._path.is_file():  # opening a pipe would block
                return [], False
            reader = self._reader
            if reader is None or not reader.is_current:
                reader = LineReader(self._path, tail=True)
            is_other, self._reader = reader is not self._reader, reader
            return reader.read(), is_other
        except OSError:
            return [], False


def _head(path: Path) -> list[dict[str, Any]]:
    """The first line."""
    with suppress(OSError):
        if path.is_file() and isinstance(value := first_line(path), dict):  # opening a pipe would block
            return [value]
    return []


def worker_files(files: RunFiles) -> dict[int, WorkerFile]:
    """The workers' status files by rank."""
    found = {}
    for path in files.ranks.glob("rank-*.json"):
        if match := _STATUS_FILE.fullmatch(path.name):
            with suppress(OSError):  # its worker has another rank now
                found[int(match[1])] = read_mapping(path), path.stat().st_mtime
    return found


def _changed(path: Path) -> float:
    """As Unix time; 0 for a file that does not exist."""
    return path.stat().st_mtime if path.is_file() else 0.0


def _facts(values: Mapping[str, Any], changed: float, now: float, started: float) -> WorkerFacts:
    return WorkerFacts(
        host=str(values.get("host") or ""),
        device=str(values.get("device") or ""),
        # By the file's time, not the recorded one: the clocks of hosts differ. Not of a start before this one.
        silent_s=max(now - changed, 0.0) if changed >= started else None,
        gpu=number_or_none(values.get("gpu")),
        cpu=number_or_none(values.get("cpu")),
        gpu_memory_bytes=number_or_none(values.get("gpu_memory")),
        gpu_memory_total_bytes=number_or_none(values.get("gpu_memory_limit")),
    )


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
