"""Merges a file with the files it extends and the command line's settings, then replaces variables, `${name}`."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.cli.config.errors import COMMAND_LINE, ConfigError, Origin, Problem, fail, nearest
from paceline.cli.config.yaml_tree import MAX_DEPTH, Node, checked_text, found, merge, read_file, read_value, scalar

EXTENDS, VARIABLES = "extends", "variables"
_MAX_FILES = 100
_MAX_TEXT = 100_000

_ENVIRONMENT = "env"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# An escape, a reference, or the start of a reference that is not closed.
_TOKEN = re.compile(r"\$\$\{|\$\{(?P<inside>[^{}]*)\}|\$\{")


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


def substitute(root: Node, environment: Mapping[str, str]) -> Node:
    """The tree without its `variables` section, every reference replaced by its value."""
    entries = dict(root.mapping or {})
    declared = entries.pop(VARIABLES, None)
    if declared is not None and declared.mapping is None:
        raise fail(declared.origin, f"{VARIABLES} is {found(declared)}: expected a mapping of names to values")
    substitution = _Substitution({} if declared is None else declared.mapping or {}, environment)
    substituted = substitution.of(Node(entries, root.origin))
    if substitution.problems:
        raise ConfigError(substitution.problems)
    return substituted


class _Substitution:
    def __init__(self, variables: Mapping[str, Node], environment: Mapping[str, str]) -> None:
        self._variables = variables
        self._environment = environment
        self._values: dict[str, Node] = {}
        self._open: list[str] = []  # the variables being substituted, outermost first
        self.problems = [
            Problem(node.origin, f"{name!r} is not allowed as a variable name: use letters, digits and _, and not env")
            for name, node in variables.items()
            if not _NAME.fullmatch(name) or name == _ENVIRONMENT
        ]

    def of(self, node: Node) -> Node:
        content = node.content
        if isinstance(content, dict):
            return Node({key: self.of(value) for key, value in content.items()}, node.origin)
        if isinstance(content, tuple):
            return Node(tuple(map(self.of, content)), node.origin)
        if not isinstance(content, str) or "${" not in content:
            return node
        try:
            return self._of_text(content, node.origin)
        except ConfigError as error:
            self.problems += error.problems
            return node

    def _of_text(self, text: str, origin: Origin) -> Node:
        whole = _TOKEN.fullmatch(text)
        if whole and whole["inside"] is not None:
            return self._value(whole["inside"], origin)  # keeps its type
        pieces, end, length = [], 0, 0
        for token in _TOKEN.finditer(text):
            pieces += [text[end : token.start()], self._as_text(token, origin)]
            end = token.end()
            length += len(pieces[-1])
            if length > _MAX_TEXT:
                raise fail(origin, f"variables expand this text to more than {_MAX_TEXT} characters: use fewer")
        return Node("".join([*pieces, text[end:]]), origin)

    def _as_text(self, token: re.Match[str], origin: Origin) -> str:
        if token[0] == "$${":
            return "${"
        if token["inside"] is None:
            raise fail(origin, "a reference is not closed: write ${name}, or $${ for a literal ${")
        node = self._value(token["inside"], origin)
        if isinstance(node.content, dict | tuple):
            raise fail(origin, f"{token[0]} is {found(node)}: only scalars can be part of a longer text")
        return node.content if isinstance(node.content, str) else found(node)

    def _value(self, inside: str, origin: Origin) -> Node:
        name, colon, default = inside.partition(":")
        is_environment = name == _ENVIRONMENT
        if is_environment:
            name, colon, default = default.partition(":")
        if not _NAME.fullmatch(name):
            raise fail(origin, f"${{{inside}}} is not a reference: write ${{name}}, ${{name:default}} or ${{env:NAME}}")
        if is_environment and name in self._environment:
            return Node(scalar(checked_text(self._environment[name], origin), origin), origin)
        if not is_environment and name in self._variables:
            return self._variable(name, origin)
        if colon:
            return Node(scalar(default, origin), origin)
        if is_environment:
            raise fail(origin, f"the environment variable {name} is not set: set it, or write ${{env:{name}:default}}")
        raise fail(origin, f"unknown variable {name!r}: {nearest(name, self._variables)}")

    def _variable(self, name: str, origin: Origin) -> Node:
        if name in self._open:
            circle = " -> ".join([*self._open[self._open.index(name) :], name])
            raise fail(origin, f"variables refer to one another in a circle: {circle}")
        if len(self._open) >= MAX_DEPTH:
            raise fail(origin, f"more than {MAX_DEPTH} variables refer to one another: use fewer")
        if name not in self._values:
            self._open.append(name)
            try:
                self._values[name] = self.of(self._variables[name])
            finally:
                self._open.pop()
        return self._values[name].at(replace(origin, variable=name, variable_origin=self._variables[name].origin))
