"""The manifest: what a checkpoint holds, how workers share it, and the size and SHA-256 of each file.

It is a JSON file that ends with the SHA-256 of the rest. Its bytes are a function of its content, so any change is
detected, even one that does not change the meaning of the JSON.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.files import FileRecord

if TYPE_CHECKING:
    from paceline.core.world import World

FORMAT = "paceline-checkpoint"
FORMAT_VERSION = 1

MANIFEST_NAME = "manifest.json"
# The part name of a component that is stored once.
WHOLE = "whole"

COMPONENT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")
_PART_NAME = re.compile(r"whole|(rank|node)-\d+")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(json|safetensors)")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_FIELDS: dict[str, type] = {
    **{"step": int, "world_size": int, "created": str},
    **dict.fromkeys(("versions", "configuration", "position", "metrics"), dict),
}
_KIND_NAMES = {int: "a count", str: "a text", dict: "a dict"}


class Pattern(StrEnum):
    """How workers share a component's state.

    REPLICATED is equal on all workers and stored once. GLOBAL is held by rank 0 alone. PER_RANK differs between
    workers. PER_NODE differs between nodes and is held by the first worker of each.
    """

    REPLICATED = "REPLICATED"
    GLOBAL = "GLOBAL"
    PER_RANK = "PER_RANK"
    PER_NODE = "PER_NODE"

    def part_of(self, world: World) -> str:
        """The part that belongs to this worker. A node is named after the rank of its first worker."""
        if self is Pattern.PER_RANK:
            return f"rank-{world.rank}"
        return f"node-{world.rank - world.local_rank}" if self is Pattern.PER_NODE else WHOLE


def stem_of(component: str, part: str) -> str:
    """The start of the names of the part's files."""
    return component if part == WHOLE else f"{component}.{part}"


@dataclass(frozen=True)
class ComponentFiles:
    """A component's file names by part: `whole`, or `rank-3`, or `node-4`."""

    pattern: Pattern
    parts: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Contents:
    """The components of a checkpoint, or of one worker's share of it, and the record of each file."""

    components: Mapping[str, ComponentFiles] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Contents:
        """Raises ValueError, KeyError, TypeError or AttributeError for anything that `asdict` did not return."""
        files = {name: FileRecord(**record) for name, record in found["files"].items()}
        for file, record in files.items():
            # Only names inside this folder: the manifest must not lead to another one.
            if not _FILE_NAME.fullmatch(file) or file == MANIFEST_NAME:
                raise ValueError(f"it lists a file {file!r}")
            if type(record.size) is not int or record.size < 0 or not _SHA256.fullmatch(record.sha256):
                raise ValueError(f"it lists {file!r} as {record}")
        components = {}
        unclaimed = set(files)
        for name, entry in found["components"].items():
            parts = {part: tuple(names) for part, names in entry["parts"].items()}
            if not COMPONENT_NAME.fullmatch(name) or not all(map(_PART_NAME.fullmatch, parts)):
                raise ValueError(f"component {name!r} has parts {list(parts)}")
            components[name] = ComponentFiles(Pattern(entry["pattern"]), parts)
            for names in parts.values():
                if foreign := sorted(set(names) - unclaimed):
                    raise ValueError(f"component {name!r} has files {foreign} that are not its own")
                unclaimed.difference_update(names)
        if unclaimed:
            raise ValueError(f"the files {sorted(unclaimed)} belong to no component")
        return cls(components, files)

    @classmethod
    def merge(cls, shares: Iterable[Contents]) -> Contents:
        """The shares of several workers as one. A part written by several workers has the files of all."""
        components: dict[str, ComponentFiles] = {}
        files: dict[str, FileRecord] = {}
        for share in shares:
            files.update(share.files)
            for name, found in share.components.items():
                parts = dict(components[name].parts) if name in components else {}
                for part, names in found.parts.items():
                    parts[part] = (*parts.get(part, ()), *names)
                components[name] = ComponentFiles(found.pattern, parts)
        return cls(components, files)


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint. `configuration`, `position` and `metrics` are plain values of the caller's."""

    step: int
    world_size: int = 1
    contents: Contents = field(default_factory=Contents)
    configuration: Mapping[str, Any] = field(default_factory=dict)
    position: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=lambda: library_versions())
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def render(self) -> bytes:
        from paceline.core.tree import flatten  # imports torch

        values = flatten({name: getattr(self, name) for name in _FIELDS}, "manifest").structure
        return _render({"format": FORMAT, "format_version": FORMAT_VERSION, **values, **asdict(self.contents)})

    @classmethod
    def parse(cls, content: bytes) -> Manifest:
        """The manifest that `render` returned these bytes for. For other bytes, raises an error with the cause."""
        try:
            found = json.loads(content)
            _check_version(found)
            _check_digest(found, content)
            values = {name: found[name] for name in _FIELDS}
            if b'"$"' in content:  # most manifests have only what JSON has, and need no torch
                from paceline.core.tree import unflatten

                values = unflatten(values, {})
            for name, kind in _FIELDS.items():
                if type(values[name]) is not kind or (kind is int and values[name] < 0):
                    raise ValueError(f"{name} is {values[name]!r}, not {_KIND_NAMES[kind]}")
            return cls(contents=Contents.from_json(found), **values)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"is damaged: {type(error).__name__}: {error}") from None


def library_versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    import numpy as np
    import torch

    try:
        own = version("paceline")
    except PackageNotFoundError:
        own = "unknown"
    torch_version, python = str(torch.__version__), platform.python_version()
    return {"paceline": own, "torch": torch_version, "python": python, "numpy": np.__version__}


def _render(content: Mapping[str, Any]) -> bytes:
    content = {name: value for name, value in content.items() if name != "digest"}
    return _dump({**content, "digest": hashlib.sha256(_dump(content)).hexdigest()})


def _dump(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"


def _check_version(found: Mapping[str, Any]) -> None:
    if found["format"] != FORMAT:
        raise ValueError(f"its format is {found['format']!r}, not {FORMAT!r}")
    version = found["format_version"]
    if type(version) is int and version > FORMAT_VERSION:
        raise CheckpointError(
            f"has format version {version}, this version of paceline reads up to {FORMAT_VERSION}: "
            "read it with a newer paceline"
        )
    if version != FORMAT_VERSION:
        raise ValueError(f"its format version is {version!r}, which does not exist")


def _check_digest(found: Mapping[str, Any], content: bytes) -> None:
    expected = _render(found)
    if content != expected:
        digest = json.loads(expected)["digest"]
        raise CheckpointError(
            f"is damaged: it says its digest is {found.get('digest')!r}, its content gives {digest!r}"
            + (", but some of its bytes differ from how it was written" if digest == found.get("digest") else "")
        )
