"""One run in detail, as the API shows it: see docs/watch-api.md."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from time import time
from typing import Any

from paceline.cli.watch.runs import RunEntry
from paceline.cli.watch.safe_files import document, entries, file_stat, read_bytes
from paceline.cli.watch.verdicts import verdicts_of
from paceline.observe import formats
from paceline.observe.events import event_text
from paceline.observe.json_lines import LineReader, is_count, is_number, number_or_none, parse_lines
from paceline.observe.metrics import flat_items, is_step
from paceline.observe.rates import LANES
from paceline.observe.run_files import process_started
from paceline.observe.verdicts.read import WorkerFile

HEAD_BYTES = 64 << 10
LOG_BYTES = 64 << 10
EVENT_BYTES = 1 << 20
MAX_PLANS = 50
# A worker on another host that has not written its status for so long has left.
SILENT_S = 30.0

# Of a worker, with their names in its status file.
_STATUS_NUMBERS = {
    **{"memory_bytes": "memory", "memory_limit_bytes": "memory_limit", "device_memory_bytes": "gpu_memory"},
    **{"device_memory_limit_bytes": "gpu_memory_limit", "cpu": "cpu", "gpu": "gpu"},
}
_RANK_FILE = re.compile(r"rank-(\d{1,6})\.(json|out|err)")
_CHECKPOINT = re.compile(r"step-(\d{8,18})")


def view(run: RunEntry) -> dict[str, Any]:
    """Everything about a run but its curves, events, log, checkpoints and configuration."""
    files, status = run.files, run.status
    environment = document(files.environment)
    versions, git, command = (environment.get(name) for name in ("versions", "git", "command"))
    step_at = number_or_none(run.lead.get("step_at"))
    workers = dict(_status_files(run))
    return {
        "now": time(),
        **run.row(),
        "last_step_at": max(step_at or 0.0, run.metrics_changed) or None if run.step else None,
        "efficiency": number_or_none(run.last.get("efficiency")),
        "pid": status.pid if status else None,
        "versions": [[k, v] for k, v in versions.items() if v is not None] if isinstance(versions, dict) else [],
        "git": git if isinstance(git, dict) else None,
        "command": [str(word) for word in command] if isinstance(command, list) else [],
        "folder": str(files.root.absolute()),
        "names": names_of(run),
        "workers": workers_of(run, workers),
        "verdicts": verdicts_of(run, workers),
        "plan": plan_of(run),
    }


def news_of(run: RunEntry) -> Any:
    """What is shown at once when it changes: whether the run goes on, what holds it back, who has left."""
    workers = dict(_status_files(run))
    verdicts = [(each["kind"], each["severity"], each["ranks"]) for each in verdicts_of(run, workers)]
    return run.state, run.status and run.status.reason, verdicts, [_is_alive(*worker) for worker in workers.values()]


def plan_of(run: RunEntry) -> dict[str, Any] | None:
    """What `paceline plan --run` predicted: a sentence, and a row per alternative."""
    found = document(run.files.plan)
    advice, rows = _text(found.get("advice")), found.get("alternatives")
    if advice is None or not isinstance(rows, list):
        return None
    words, numbers = ("workers", "strategy", "limit"), ("samples_per_s", "efficiency", "epoch_s", "epoch_cost")
    shown = [
        {**{name: _text(row.get(name)) for name in words}, **{name: number_or_none(row.get(name)) for name in numbers}}
        for row in rows[:MAX_PLANS]
        if isinstance(row, dict)
    ]
    return {"advice": advice, "alternatives": shown}


def end_of(path: Path) -> int:
    """Where the last complete line ends."""
    found = file_stat(path)
    if found is None:
        return 0
    tail = read_bytes(path, HEAD_BYTES, from_end=True) or b""
    return max(found.st_size, len(tail)) - len(tail) + tail.rfind(b"\n") + 1


def names_of(run: RunEntry) -> list[str]:
    """The names in the first lines of the metrics and in those that were last at some time, by first appearance."""
    found = file_stat(run.files.metrics)
    if found is None:
        return []
    # A short file grows: it is read when its size has doubled.
    num_bytes = min(1 << found.st_size.bit_length() >> 1, HEAD_BYTES)
    run.names |= _head_names(run.files.metrics, found.st_ino, num_bytes)
    run.names |= dict.fromkeys(name for name, _ in flat_items(run.last) if name != "step")
    return list(run.names)


@lru_cache(maxsize=64)
def _head_names(path: Path, inode: int, num_bytes: int) -> dict[str, None]:  # noqa: ARG001
    """inode: of the file, since another one may have its name later."""
    seen: set[str] = set()
    names: dict[str, None] = {}
    for record in parse_lines((read_bytes(path, num_bytes) or b"").split(b"\n")[:-1]):
        if is_step(record) and not seen.issuperset(record):
            seen.update(record)
            names |= dict.fromkeys(name for name, _ in flat_items(record) if name != "step")
    return names


def workers_of(run: RunEntry, known: Mapping[int, WorkerFile]) -> list[dict[str, Any]]:
    """known: their status files by rank."""
    num_workers = run.num_workers or (max(known) + 1 if known else 1)
    is_live = run.state == "live"
    shares = _numbers(run.last.get("shares")) or ([1.0] if num_workers == 1 else [])
    # Of the last lines: a single one is often a few micro-batches. The verdicts are about several lines too.
    work = run.work if len(run.work) == len(shares) else shares
    speeds, waiting = _numbers(run.last.get("speeds")), _numbers(run.last.get("waiting"))
    lanes = run.last.get("lanes")
    lists = {name: _numbers(lanes.get(name)) for name in LANES} if isinstance(lanes, dict) else {}
    lists["waiting"] = waiting or ([0.0] if num_workers == 1 and lists else [])

    def at(numbers: list[float], rank: int) -> float | None:
        return numbers[rank] if rank < len(numbers) else None

    workers = []
    for rank in sorted({*range(num_workers), *known}):
        status, seen = known.get(rank, ({}, None))
        count = at(shares, rank)
        parts = {name: at(lists.get(name, []), rank) for name in ("computing", "data", "waiting", "exchange", "rest")}
        workers.append(
            {
                "rank": rank,
                **{name: _text(status.get(name)) for name in ("host", "device", "device_name")},
                "pid": status.get("pid") if is_count(status.get("pid")) else None,
                **{name: number_or_none(status.get(key)) for name, key in _STATUS_NUMBERS.items()},
                "seen": seen,
                "step": status.get("step") if is_count(status.get("step")) else None,
                "is_alive": is_live and rank < num_workers and _is_alive(status, seen),
                "num_micro_batches": count,
                "share": work[rank] / sum(work) if count is not None and sum(work) > 0 else None,
                "speed": at(speeds, rank),
                "lanes": parts if any(part is not None for part in parts.values()) else None,
            }
        )
    return workers


def _status_files(run: RunEntry) -> Iterator[tuple[int, WorkerFile]]:
    started = run.status_changed if run.state == "live" else 0.0  # a file before that is of an earlier start
    for rank, kind, path in rank_files(run):
        if kind == "json" and (found := file_stat(path)) is not None and found.st_mtime >= started:
            yield rank, (document(path), found.st_mtime)


def rank_files(run: RunEntry) -> list[tuple[int, str, Path]]:
    """Rank, kind ("json", "out" or "err") and path of the workers' files, in this order."""
    matches = [(path, _RANK_FILE.fullmatch(path.name)) for path in entries(run.files.ranks)]
    return sorted((int(match[1]), match[2], path) for path, match in matches if match)


def _is_alive(status: Mapping[str, Any], seen: float | None) -> bool:
    if seen is None:
        return True  # it did not start to write, or the run has an older version
    if status.get("host") == socket.gethostname() and is_count(status.get("pid")):
        return process_started(status["pid"]) == status.get("process_started")
    return time() - seen < SILENT_S


def events_of(run: RunEntry, limit: int) -> dict[str, Any]:
    """The newest events, the oldest first."""
    found = file_stat(run.files.events)
    if found is None:
        return {"offset": 0, "num_left_out": 0, "events": []}
    end, start = end_of(run.files.events), max(0, found.st_size - EVENT_BYTES)
    events = list(filter(None, map(shown_event, LineReader(run.files.events, start=start, stop=end).read())))
    kept = events[-limit:] if limit else []
    return {"offset": end, "num_left_out": len(events) - len(kept) if start == 0 else None, "events": kept}


def shown_event(record: Any) -> dict[str, Any] | None:
    """None if a line is not an event."""
    if not isinstance(record, dict):
        return None
    name, details = record.get("event"), record.get("details")
    if not isinstance(name, str) or not is_count(record.get("step")):
        return None
    details = details if isinstance(details, dict) else {}
    moment = number_or_none(record.get("time"))
    return {
        "time": moment,
        "step": record["step"],
        "event": name,
        "details": details,
        "text": event_text(name, details),
    }


def log_of(run: RunEntry, rank: int | None, stream: str | None, num_lines: int) -> dict[str, Any]:
    files = []
    for each, kind, path in rank_files(run):
        found = file_stat(path)
        if kind == "json" or found is None or rank not in (None, each) or stream not in (None, kind):
            continue
        lines, is_cut = log_lines(read_bytes(path, LOG_BYTES, from_end=True) or b"", num_lines)
        facts = {"rank": each, "stream": kind, "num_bytes": found.st_size, "changed": found.st_mtime}
        files.append({**facts, "is_cut": is_cut or found.st_size > LOG_BYTES, "lines": lines})
    return {"files": files}


def log_lines(content: bytes, num_lines: int) -> tuple[list[str], bool]:
    """The last lines, safe to show, and whether there are more. A carriage return begins a line anew."""
    lines = content.decode(errors="replace").replace("\r\n", "\n").removesuffix("\n").split("\n") if content else []
    shown = [
        formats.one_line(line.rstrip("\r").rpartition("\r")[2]) for line in lines[max(len(lines) - num_lines, 0) :]
    ]
    return shown, len(lines) > num_lines


def checkpoints_of(run: RunEntry) -> dict[str, Any]:
    """The complete ones, the newest first."""
    matches = [(path, _CHECKPOINT.fullmatch(path.name)) for path in entries(run.files.checkpoints)]
    complete = [(int(match[1]), path) for path, match in matches if match and file_stat(path / "manifest.json")]
    return {"checkpoints": [_checkpoint(step, path) for step, path in sorted(complete, reverse=True)]}


def _checkpoint(step: int, folder: Path) -> dict[str, Any]:
    manifest, saved = document(folder / "manifest.json"), None
    with suppress(OSError, ValueError, TypeError):
        saved = datetime.fromisoformat(str(manifest.get("created"))).timestamp()
    with suppress(OSError):
        saved = saved or folder.stat().st_mtime
    sizes = [found.st_size for path in entries(folder) if (found := file_stat(path)) is not None]
    metrics = manifest.get("metrics")
    return {
        "step": step,
        "name": folder.name,
        "saved": saved,
        "num_bytes": sum(sizes),
        "num_files": len(sizes),
        "metrics": list(flat_items(metrics)) if isinstance(metrics, dict) else [],
    }


def _numbers(value: Any) -> list[float]:
    return value if isinstance(value, list) and all(map(is_number, value)) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
