"""Merges a file with the files it extends, and with the settings of the command line."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.cli.config.errors import COMMAND_LINE, fail
from paceline.cli.config.yaml_tree import Node, found, merge, read_file, read_value

EXTENDS = "extends"
_MAX_FILES = 100


def read_layers(path: Path, sections: Collection[str]) -> Node:
    """The file over those it extends. A section without content (`trainer:` and nothing under it) is ignored."""
    return _Layers(sections).read(path, ())


class _Layers:
    def __init__(self, sections: Collection[str]) -> None:
        self._sections = sections
        self._num_files = 0

    def read(self, path: Path, chain: tuple[Path, ...]) -> Node:
        """chain: the files that led to this one, each extending the next."""
        node = read_file(path)
        self._num_files += 1
        if self._num_files > _MAX_FILES:
            raise fail(node.origin, f"more than {_MAX_FILES} files extend one another: use fewer")
        entries = dict(node.mapping or {})
        bases = _bases(entries.pop(EXTENDS, None))
        merged = Node({k: v for k, v in entries.items() if not self._is_empty_section(k, v)}, node.origin)
        for base in reversed(bases):
            merged = merge(self._extended(base, (*chain, path)), merged)
        return merged

    def _is_empty_section(self, key: str, node: Node) -> bool:
        return node.content is None and key in self._sections

    def _extended(self, base: Node, chain: tuple[Path, ...]) -> Node:
        path = Path(os.path.normpath(chain[-1].parent / str(base.content)))
        names = " -> ".join(str(file) for file in (*chain, path))
        if os.path.realpath(path) in map(os.path.realpath, chain):
            raise fail(base.origin, f"files extend one another in a circle: {names}")
        if not path.is_file():
            raise fail(base.origin, f"the file {path} to extend does not exist: {names}")
        return self.read(path, chain)


def _bases(node: Node | None) -> tuple[Node, ...]:
    if node is None:
        return ()
    bases = node.content if isinstance(node.content, tuple) else (node,)
    for base in bases:
        if not isinstance(base.content, str) or not base.content:
            raise fail(base.origin, f"{EXTENDS} is {found(base)}: expected a file, or a list of files")
    return bases


def with_overrides(root: Node, overrides: Sequence[str]) -> Node:
    """Settings of the command line, such as `trainer.seed=3`, over those of the files."""
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(part and part.isprintable() for part in parts):
            raise fail(COMMAND_LINE, f"{override!r} is not a setting: write key=value, such as trainer.seed=3")
        if parts[0] == EXTENDS:
            raise fail(COMMAND_LINE, f"{override!r}: `extends` is allowed in files only")
        node = read_value(text)
        for part in reversed(parts):
            node = Node({part: node}, COMMAND_LINE)
        root = merge(root, node)
    return root
