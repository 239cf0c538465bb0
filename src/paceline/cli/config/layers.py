"""Merges a file with the files it extends and the command line's settings, then replaces variables, `${name}`."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.cli.config.errors import COMMAND_LINE, ConfigError, Origin, fail, nearest
from paceline.cli.config.yaml_tree import MAX_DEPTH, Content, Node, found, read_file, read_value, scalar

EXTENDS, VARIABLES = "extends", "variables"
_MAX_FILES = 100
_MAX_TEXT = 100_000

# A mapping that selects another factory, reference or kind replaces the mapping it is merged into.
_SELECTORS = ("factory", "reference", "kind")

_ENVIRONMENT = "env"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# An escape, a reference, or the start of a reference that is not closed.
_TOKEN = re.compile(r"\$\$\{|\$\{(?P<inside>[^{}]*)\}|\$\{")


def read_layers(path: Path, sections: Collection[str]) -> Node:
    """The file over the files it extends. A section without content (`trainer:` and nothing under it) is ignored."""
    num_files = 0

    def read(path: Path, chain: tuple[Path, ...]) -> Node:
        """chain: the files that led to this one, each extending the next."""
        nonlocal num_files
        num_files += 1
        root = read_file(path)
        if num_files > _MAX_FILES:
            raise fail(root.origin, f"more than {_MAX_FILES} files extend one another: use fewer")
        entries = {key: node for key, node in root.entries.items() if node.content is not None or key not in sections}
        extends = entries.pop(EXTENDS, Node((), root.origin))
        merged, chain = Node(entries, root.origin), (*chain, path)
        for base in reversed(extends.content if isinstance(extends.content, tuple) else (extends,)):
            merged = merge(read(_path_of(base, chain), chain), merged)
        return merged

    return read(path, ())


def _path_of(base: Node, chain: tuple[Path, ...]) -> Path:
    """The path of the file that the last of `chain` extends."""
    if not isinstance(base.content, str) or not base.content:
        raise fail(base.origin, f"{EXTENDS} is {found(base)}: expected a file, or a list of files")
    path = Path(os.path.normpath(chain[-1].parent / base.content))
    names = " -> ".join(str(file) for file in (*chain, path))
    if os.path.realpath(path) in map(os.path.realpath, chain):
        raise fail(base.origin, f"files extend one another in a circle: {names}")
    if not path.is_file():
        raise fail(base.origin, f"the file {path} to extend does not exist: {names}")
    return path


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`. Mappings merge key by key; lists and scalars replace."""
    if not isinstance(base.content, dict) or not isinstance(over.content, dict):
        return over
    before, after = _selection(base), _selection(over)
    if before and after and before != after:
        return over
    below = base.entries
    above = {key: merge(below[key], node) if key in below else node for key, node in over.entries.items()}
    return Node(below | above, over.origin)


def _selection(node: Node) -> tuple[str, Content] | None:
    return next(((key, node.entries[key].content) for key in _SELECTORS if key in node.entries), None)


def with_overrides(root: Node, overrides: Sequence[str]) -> Node:
    """Settings of the command line, such as `trainer.seed=3`, over the files' settings."""
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


def substitute(root: Node, environment: Mapping[str, str], *, allow_unused: bool = False) -> Node:
    """The tree without its `variables` section, every reference replaced by its value.

    allow_unused: a variable of the command line that nothing refers to is no error.
    """
    entries = dict(root.entries)
    declared = entries.pop(VARIABLES, Node({}, root.origin))
    if not isinstance(declared.content, dict):
        raise fail(declared.origin, f"{VARIABLES} is {found(declared)}: expected a mapping of names to values")
    substitution = _Substitution(declared.entries, environment)
    substituted = substitution.of(Node(entries, root.origin))
    if not allow_unused:
        substitution.check_given()
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
            (node.origin, f"{name!r} is not allowed as a variable name: use letters, digits and _, and not env")
            for name, node in variables.items()
            if not _NAME.fullmatch(name) or name == _ENVIRONMENT
        ]

    def check_given(self) -> None:
        """A variable of the command line that nothing refers to is a problem; not in files, which others extend."""
        for name, node in self._variables.items():
            if node.origin == COMMAND_LINE and name not in self._values:
                hint = nearest(name, self._values) if self._values else "leave it out"
                problem = f"{VARIABLES}.{name} has no effect, since nothing refers to ${{{name}}}: {hint}"
                self.problems.append((node.origin, problem))

    def of(self, node: Node) -> Node:
        content = node.content
        if isinstance(content, dict):
            return Node({key: self.of(value) for key, value in content.items()}, node.origin)
        if isinstance(content, tuple):
            return Node(tuple(map(self.of, content)), node.origin)
        try:
            return self._of_text(content, node.origin) if isinstance(content, str) else node
        except ConfigError as error:
            self.problems += error.problems
            return node

    def _of_text(self, text: str, origin: Origin) -> Node:
        whole = _TOKEN.fullmatch(text)
        if whole and whole["inside"] is not None:
            return self._value(whole["inside"], origin)  # keeps its type
        length = 0

        def replaced(token: re.Match[str]) -> str:
            nonlocal length
            piece = self._as_text(token, origin)
            length += len(piece)
            if length > _MAX_TEXT:
                raise fail(origin, f"variables expand this text to more than {_MAX_TEXT} characters: use fewer")
            return piece

        return Node(_TOKEN.sub(replaced, text), origin)

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
            return Node(scalar(self._environment[name], origin), origin)
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
        place = replace(origin, variable=name, variable_origin=self._variables[name].origin)
        return replace(self._values[name], origin=place)
