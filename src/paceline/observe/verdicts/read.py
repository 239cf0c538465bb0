"""Reads what verdicts need from a run's folder: the ends of its files, so it takes milliseconds for any run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from time import time
from typing import Any

from paceline.observe.json_lines import LineReader, is_count, is_number, parse_lines
from paceline.observe.metrics import RESUMED_FROM
from paceline.observe.run_files import RunFiles, read_json, read_status, state_of
from paceline.observe.timeline.files import timeline_files
from paceline.observe.verdicts.evidence import Evidence, Happened, WorkerFacts, lines_of

MAX_CONFIG_BYTES = 1 << 20
MAX_HEAD_BYTES = 1 << 16


def read_evidence(files: RunFiles, now: float | None = None) -> Evidence:
    """now: Unix time; the current time by default."""
    now = time() if now is None else now
    status = read_status(files)
    state = state_of(files, status)
    records = list(_tail(files.metrics))
    events = [
        Happened(str(record["event"]), record["step"], _mapping(record.get("details")))
        for record in _tail(files.events)
        if "event" in record and is_count(record.get("step"))
    ]
    environment = _mapping(read_json(files.environment))
    host = _mapping(environment.get("host"))
    found = _workers(files, now)
    for facts in found.values():
        if facts.get("host") == host.get("name"):
            facts.setdefault("memory_limit", host.get("memory_bytes"))
            facts.setdefault("gpu_memory_limit", _device_memory(environment, str(facts.get("device"))))
    lines = lines_of(_current(records))
    head = lines_of(_head(files.metrics))
    return Evidence(
        state=state,
        reason=status.reason if status else None,
        lines=lines,
        is_whole=bool(lines and head) and lines[0].step == head[0].step,
        first_loss=head[0].loss if head else None,
        events=events,
        workers=[_facts(found.get(rank, {})) for rank in range(max(found, default=-1) + 1)],
        silent_s=max(now - files.metrics.stat().st_mtime, 0.0) if files.metrics.is_file() else None,
        settings=read_settings(files.config),
        host_memory_bytes=_number(found.get(0, {}).get("host_memory")),
        host_memory_total_bytes=_number(found.get(0, {}).get("memory_limit")),
        cores=cores if is_count(cores := host.get("cores")) else None,
    )


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a config.yaml by flat name, such as "trainer.readers"; empty if it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return {}
    return _settings(path, (found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=64)
def _settings(path: Path, stamp: tuple[int, int, int]) -> dict[str, Any]:  # noqa: ARG001
    """Parsing YAML takes longer than all the rest, and runs do not change their settings. stamp: of the content."""
    import yaml  # type: ignore[import-untyped]

    try:
        content = path.read_bytes()
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        tree = yaml.load(content, loader) if len(content) <= MAX_CONFIG_BYTES else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return dict(_flat(tree)) if isinstance(tree, dict) else {}


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _tail(path: Path) -> list[dict[str, Any]]:
    try:
        return LineReader(path, tail=True).read() if path.is_file() else []
    except OSError:
        return []


def _head(path: Path) -> list[dict[str, Any]]:
    """The first line."""
    try:
        with path.open("rb") as file:
            values = parse_lines([file.readline(MAX_HEAD_BYTES)])
    except OSError:
        return []
    return [value for value in values if isinstance(value, dict)]


def _current(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without lines that a resumed run superseded."""
    kept: list[dict[str, Any]] = []
    for record in records:
        if is_count(record.get(RESUMED_FROM)) and "step" not in record:
            kept = [line for line in kept if line["step"] <= record[RESUMED_FROM]]
        elif is_count(record.get("step")):
            kept.append(record)
    return kept


def _workers(files: RunFiles, now: float) -> dict[int, dict[str, Any]]:
    """By rank: from the workers' status files, and from the ends of their timelines what these lack."""
    found: dict[int, dict[str, Any]] = {}
    for path in timeline_files(files.root):
        facts = _from_timeline(path, now)
        if is_count(facts.get("rank")):
            found[facts["rank"]] = facts
    for path in files.ranks.glob("rank-*.json"):
        facts = _mapping(read_json(path))
        if is_count(facts.get("rank")):
            # The time of the file, not the one in it: the clocks of hosts differ.
            silent_s = now - path.stat().st_mtime
            found[facts["rank"]] = {**found.get(facts["rank"], {}), **facts, "silent_s": silent_s}
    return found


def _device_memory(environment: Mapping[str, Any], device: str) -> Any:
    """Of a device of the first worker's host, such as "cuda:1"."""
    devices, number = environment.get("devices"), device.partition("cuda:")[2]
    if not isinstance(devices, list) or not number.isdecimal() or int(number) >= len(devices):
        return None
    return _mapping(devices[int(number)]).get("memory_bytes")


def _facts(values: Mapping[str, Any]) -> WorkerFacts:
    silent_s = _number(values.get("silent_s"))
    return WorkerFacts(
        host=str(values.get("host") or ""),
        device=str(values.get("device") or ""),
        silent_s=None if silent_s is None else max(silent_s, 0.0),
        gpu=_number(values.get("gpu")),
        cpu=_number(values.get("cpu")),
        gpu_memory_bytes=_number(values.get("gpu_memory")),
        gpu_memory_total_bytes=_number(values.get("gpu_memory_limit")),
    )


def _from_timeline(path: Path, now: float) -> dict[str, Any]:
    """The last session's header, with the newest samples."""
    values: dict[str, Any] = {}
    for line in [*_head(path), *_tail(path)]:
        values |= _mapping(line.get("session"))
        with suppress(TypeError, ValueError):
            for _, _, sample in line.get("samples", ()):
                values |= _mapping(sample)
    return {**values, "silent_s": now - path.stat().st_mtime}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None
