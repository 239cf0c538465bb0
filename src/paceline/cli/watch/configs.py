"""The configurations of runs: flat, compared with that of the parent, and with each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from paceline.cli.watch.runs import MAX_CONFIG_BYTES, RunEntry, Runs
from paceline.cli.watch.safe_files import read_bytes

# More settings than this are left out: YAML's aliases can make a few bytes as large as memory.
MAX_ENTRIES = 5000
MAX_DEPTH = 20
_CHECKPOINT_KEYS = ("checkpoints.resume", "checkpoints.init_from")


def config_of(run: RunEntry, runs: Runs) -> dict[str, Any]:
    """See docs/watch-api.md."""
    text = _text(run)
    own = _entries(text)
    parent, why = _parent(run, own, runs)
    found: dict[str, Any] = {"text": text, "entries": [[key, value] for key, value in own.items()], "parent": None}
    if parent is None:
        return {**found, "difference": []}
    other = _entries(_text(parent))
    changed = [key for key in {**own, **other} if own.get(key, _MISSING) != other.get(key, _MISSING)]
    difference = [
        {"key": key, **({"own": own[key]} if key in own else {}), **({"parent": other[key]} if key in other else {})}
        for key in changed
    ]
    return {**found, "parent": {"id": parent.id, "name": parent.name, "why": why}, "difference": difference}


def compare(chosen: Sequence[RunEntry]) -> dict[str, Any]:
    """The settings that are not the same in all of these runs."""
    configs = [_entries(_text(run)) for run in chosen]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [{"key": key, "values": [config.get(key) for config in configs]} for key in keys]
    different = [row for row in rows if any(value != row["values"][0] for value in row["values"])]
    return {"runs": [run.id for run in chosen], "differences": different}


class _Missing:
    pass


_MISSING = _Missing()


def _text(run: RunEntry) -> str | None:
    content = read_bytes(run.files.config, MAX_CONFIG_BYTES)
    return None if content is None else content.decode(errors="replace")


def _entries(text: str | None) -> dict[str, Any]:
    try:
        tree = yaml.load(text or "", getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return dict(islice(_flat(tree), MAX_ENTRIES)) if isinstance(tree, dict) else {}


def _flat(tree: dict[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value and depth < MAX_DEPTH:
            yield from _flat(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", _plain(value)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list) and all(each is None or isinstance(each, str | bool | int | float) for each in value):
        return value[:MAX_ENTRIES]
    if isinstance(value, date):
        return value.isoformat()
    return repr(value) if len(value) < 100 and _is_flat(value) else "..."


def _is_flat(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return not any(isinstance(each, list | dict | set | tuple) for each in items)


def _parent(run: RunEntry, config: dict[str, Any], runs: Runs) -> tuple[RunEntry | None, str]:
    """The run whose checkpoint this one started from, or the one before it of the same config."""
    others = [other for other in runs.all() if other.id != run.id]
    for key in _CHECKPOINT_KEYS:
        named = config.get(key)
        if isinstance(named, str):
            parts = Path(named).parts
            for other in others:
                if other.name in parts:
                    return other, "started from its checkpoint"
    started = run.status.started if run.status else run.changed
    for other in others:  # the newest first
        before = other.status.started if other.status else other.changed
        if before < started and other.files.config_name == run.files.config_name:
            return other, "the previous run of this config"
    return None, ""
