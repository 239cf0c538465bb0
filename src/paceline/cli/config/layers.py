"""One tree out of many: a file over those that it extends, and the command line over all."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.cli.config.errors import COMMAND_LINE, fail
from paceline.cli.config.reading import read_file, read_value
from paceline.cli.config.tree import Node, found, merge

EXTENDS = "extends"
_MAX_FILES = 100


class Layers:
    """Reads a file and what it extends. `groups` are sections that, left empty, say nothing."""

    def __init__(self, groups: Collection[str]) -> None:
        self._groups = groups
        self._num_files = 0

    def read(self, path: Path, chain: tuple[Path, ...] = ()) -> Node:
        node = read_file(path)
        self._num_files += 1
        if self._num_files > _MAX_FILES:
            raise fail(node.origin, f"more than {_MAX_FILES} files extend one another: write fewer")
        entries = node.mapping or {}
        chain = (*chain, path)
        own = {k: v for k, v in entries.items() if k != EXTENDS and (v.content is not None or k not in self._groups)}
        merged = Node(own, node.origin)
        for base in reversed(_bases(entries.get(EXTENDS))):
            merged = merge(self._extended(base, chain), merged)
        return merged

    def _extended(self, base: Node, chain: tuple[Path, ...]) -> Node:
        path = Path(os.path.normpath(chain[-1].parent / str(base.content)))
        names = " -> ".join(str(file) for file in (*chain, path))
        if any(_is_same(path, file) for file in chain):
            raise fail(base.origin, f"files that extend one another in a circle: {names}")
        if not path.is_file():
            raise fail(base.origin, f"there is no file {path} to extend: {names}")
        return self.read(path, chain)


def with_overrides(root: Node, overrides: Sequence[str]) -> Node:
    """`trainer.seed=3` of the command line over what the files say."""
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(part and part.isprintable() for part in parts):
            raise fail(COMMAND_LINE, f"{override!r} is no setting: write key=value, such as trainer.seed=3")
        if parts[0] == EXTENDS:
            raise fail(COMMAND_LINE, f"{override!r}: only files extend others")
        node = read_value(text)
        for part in reversed(parts):
            node = Node({part: node}, COMMAND_LINE)
        root = merge(root, node)
    return root


def _bases(node: Node | None) -> tuple[Node, ...]:
    if node is None:
        return ()
    bases = node.content if isinstance(node.content, tuple) else (node,)
    for base in bases:
        if not isinstance(base.content, str) or not base.content:
            raise fail(base.origin, f"{EXTENDS} is {found(base)}: give a file, or a list of files")
    return bases


def _is_same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
