"""The configurations of runs: flat, compared with that of the parent, and with each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cli.watch.runs import RunEntry, Runs
from paceline.cli.watch.safe_files import read_bytes
from paceline.observe.run_files import MAX_CONFIG_BYTES, parse_settings

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
    difference = []
    for key in {**own, **other}:
        values = {name: config[key] for name, config in (("own", own), ("parent", other)) if key in config}
        if len(values) < 2 or values["own"] != values["parent"]:
            difference.append({"key": key, **values})
    return {**found, "parent": {"id": parent.id, "name": parent.name, "why": why}, "difference": difference}


def compare(chosen: Sequence[RunEntry]) -> dict[str, Any]:
    """The settings that are not the same in all of these runs."""
    configs = [_entries(_text(run)) for run in chosen]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [{"key": key, "values": [config.get(key) for config in configs]} for key in keys]
    different = [row for row in rows if any(value != row["values"][0] for value in row["values"])]
    return {"runs": [run.id for run in chosen], "differences": different}


def _text(run: RunEntry) -> str | None:
    content = read_bytes(run.files.config, MAX_CONFIG_BYTES)
    return None if content is None else content.decode(errors="replace")


def _entries(text: str | None) -> dict[str, Any]:
    return parse_settings((text or "").encode())


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
