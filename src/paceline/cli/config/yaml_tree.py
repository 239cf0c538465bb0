"""Reads YAML into a tree of values, each with its place. No tags, no merge keys; nothing is executed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import yaml  # type: ignore[import-untyped]

from paceline.cli.config.errors import COMMAND_LINE, ConfigError, Origin, fail

# Anchors and variables can expand a short file without bound. These limits are far above any real project file.
MAX_FILE_BYTES = 1 << 18
MAX_VALUES = 100_000
MAX_DEPTH = 64
_MAX_DIGITS = 40

# The core schema of YAML 1.2: 1e-3 is a number, `no` is a string.
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile("[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_PLAIN, _OTHER = "plain", "other"

Scalar: TypeAlias = str | int | float | bool | None
Content: TypeAlias = "Scalar | tuple[Node, ...] | dict[str, Node]"


@dataclass(frozen=True, eq=False)
class Node:
    """A scalar, a list or a mapping. The origin of a mapping's value is its key; of a list's item, its start.

    key: the dotted key of the value; set when the tree is validated.
    """

    content: Content
    origin: Origin
    key: str = ""
    num_values: int = field(init=False)
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        children = self.content if isinstance(self.content, tuple) else self.entries.values()
        object.__setattr__(self, "num_values", 1 + sum(child.num_values for child in children))
        object.__setattr__(self, "depth", 1 + max((child.depth for child in children), default=0))
        if self.num_values > MAX_VALUES:
            raise fail(self.origin, f"anchors and variables expand this to more than {MAX_VALUES} values: use fewer")
        if self.depth > MAX_DEPTH:
            raise _too_deep(self.origin)

    @property
    def entries(self) -> dict[str, Node]:
        """Of a mapping; empty for anything else."""
        return self.content if isinstance(self.content, dict) else {}


def _too_deep(origin: Origin) -> ConfigError:
    return fail(origin, f"this is nested more than {MAX_DEPTH} levels deep: use fewer levels")


def found(node: Node) -> str:
    """A value as messages show it: short, on one line."""
    content = node.content
    if isinstance(content, dict) and content:
        return f"a mapping of {', '.join(list(content)[:4])}{', ...' if len(content) > 4 else ''}"
    if isinstance(content, tuple):
        return f"a list of {len(content)}" if content else "[]"
    if isinstance(content, str):
        return repr(content if len(content) <= 60 else f"{content[:57]}...")
    return repr(content) if isinstance(content, float) else json.dumps(content)


def dotted(parent: str, key: str) -> str:
    """The path of a key, as messages show it."""
    shown = key if key.isprintable() and key else repr(key)
    return f"{parent}.{shown}" if parent else shown


def read_file(path: Path) -> Node:
    """The content of a file: a mapping, empty for an empty file."""
    file = Origin(str(path))
    try:
        if path.is_fifo() or path.is_char_device():
            raise OSError(0, "it is a pipe or a device; use a regular file")
        with path.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise fail(file, f"cannot read the file: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise fail(Origin(str(path), 1, 1), f"the file is larger than the limit of {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        place = Origin(str(path), line, error.start - data.rfind(b"\n", 0, error.start))
        raise fail(place, f"byte {data[error.start]:#04x} is not UTF-8: save the file as UTF-8") from None
    root = _read(text, lambda line, column: Origin(str(path), line + 1, column + 1))
    if root.content is None:
        return Node({}, Origin(str(path), 1, 1))
    if not isinstance(root.content, dict):
        raise fail(root.origin, "a project file must be a mapping: lines of `key: value`")
    return root


def read_value(text: str) -> Node:
    """The value of a `key=value` on the command line."""
    return _read(text, lambda *_: COMMAND_LINE)


def scalar(text: str, origin: Origin, *, is_plain: bool = True) -> Scalar:
    """The value of a text. is_plain: it is not in quotes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise fail(origin, "half of a surrogate pair is not a character: write both halves") from None
    if not is_plain:
        return text
    if _INTEGER.fullmatch(text):
        if len(text) > _MAX_DIGITS:  # Python refuses to parse thousands of digits
            raise fail(origin, f"a number of {len(text)} digits is too long: the limit is {_MAX_DIGITS}")
        return int(text, 0 if text.startswith(("0x", "0o")) else 10)
    if text in _WORDS:
        return _WORDS[text]
    if _FLOAT.fullmatch(text):
        return float(text)
    return float(text.replace(".", "")) if _NOT_FINITE.fullmatch(text) else text


def _read(text: str, place_of: Callable[[int, int], Origin]) -> Node:
    """place_of: the origin of a line and column, counted from 0."""
    try:
        loader = _Loader(text)
        loader.place_of = place_of
        root = loader.get_single_node()
        return Node(None, place_of(0, 0)) if root is None else loader.node(root, loader.place(root))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise fail(place_of(mark.line, mark.column), f"invalid YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = place_of(before.count("\n"), error.position - before.rfind("\n") - 1)
        raise fail(place, f"the character {error.character:#x} is not allowed: remove it") from None
    except ConfigError:
        raise
    except (ValueError, OverflowError) as error:  # chr() fails for an escape such as "\U00ffffff"
        raise fail(place_of(0, 0), f"invalid YAML: {error}") from None


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Converts PyYAML's node tree to `Node`s. The target of an alias is converted once and shared."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.place_of: Callable[[int, int], Origin]
        self._depth = 0
        self._converted: dict[int, Node | None] = {}  # None while a node is being converted

    def place(self, positioned: Any) -> Origin:
        return self.place_of(positioned.start_mark.line, positioned.start_mark.column)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Refuses deep nesting early: PyYAML would recurse until the stack is exhausted."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _too_deep(self.place(self.peek_event()))
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        """The tag of an untagged node: whether it is an unquoted scalar."""
        return _PLAIN if kind is yaml.ScalarNode and implicit[0] else _OTHER

    def node(self, source: yaml.Node, origin: Origin) -> Node:
        if id(source) not in self._converted:
            self._converted[id(source)] = None
            self._converted[id(source)] = Node(self._content(source), origin)
        if (node := self._converted[id(source)]) is None:
            raise fail(origin, "this alias refers to a value that contains it")
        return replace(node, origin=origin)

    def _content(self, source: yaml.Node) -> Content:
        place = self.place(source)
        if source.tag not in (_PLAIN, _OTHER):
            raise fail(place, f"the tag {source.tag!r} is not allowed: remove it")
        if isinstance(source, yaml.ScalarNode):
            return scalar(source.value, place, is_plain=source.tag == _PLAIN)
        if isinstance(source, yaml.SequenceNode):
            return tuple(self.node(item, self.place(item)) for item in source.value)
        entries: dict[str, Node] = {}
        for key_source, value in source.value:
            place = self.place(key_source)
            key = self._content(key_source) if isinstance(key_source, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise fail(place, "a key must be a string: put it in quotes")
            if key == "<<":
                raise fail(place, "merge keys (<<) are not supported: use `extends` or a variable")
            if key in entries:
                raise fail(place, f"duplicate key {key!r}, first at {entries[key].origin}: remove one")
            entries[key] = self.node(value, place)
        return entries
