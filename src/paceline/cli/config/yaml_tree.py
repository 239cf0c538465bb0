"""Reads YAML into a tree of values, each with its place. No tags, no merge keys; nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml  # type: ignore[import-untyped]

from paceline.cli.config.errors import COMMAND_LINE, ConfigError, Origin, fail

# Anchors and variables can expand a short file without bound. These limits are far above any real project file.
MAX_FILE_BYTES = 1 << 18
MAX_VALUES = 100_000
MAX_DEPTH = 64
_MAX_DIGITS = 40

# The core schema of YAML 1.2.
_NULL = re.compile(r"|~|null|Null|NULL")
_BOOL = re.compile("true|True|TRUE|false|False|FALSE")
_INTEGER = re.compile("[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_PLAIN, _OTHER = "plain", "other"

# A mapping that selects another factory, reference or kind replaces the mapping it is merged into.
_SELECTORS = ("factory", "reference", "kind")

Scalar: TypeAlias = str | int | float | bool | None
Content: TypeAlias = "Scalar | tuple[Node, ...] | dict[str, Node]"


@dataclass(frozen=True, eq=False)
class Node:
    """A scalar, a list or a mapping. The origin of a mapping's value is its key's, that of a list's item its start."""

    content: Content
    origin: Origin
    num_values: int = field(init=False)
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        content = self.content
        children = content.values() if isinstance(content, dict) else content if isinstance(content, tuple) else ()
        object.__setattr__(self, "num_values", 1 + sum(child.num_values for child in children))
        object.__setattr__(self, "depth", 1 + max((child.depth for child in children), default=0))
        if self.num_values > MAX_VALUES:
            raise fail(self.origin, f"anchors and variables expand this to more than {MAX_VALUES} values: use fewer")
        if self.depth > MAX_DEPTH:
            raise _too_deep(self.origin)

    @property
    def mapping(self) -> dict[str, Node] | None:
        """The entries, if it is a mapping."""
        return self.content if isinstance(self.content, dict) else None

    def at(self, origin: Origin) -> Node:
        """The same content with another origin."""
        moved = copy(self)  # keeps the computed size
        object.__setattr__(moved, "origin", origin)
        return moved


def _too_deep(origin: Origin) -> ConfigError:
    return fail(origin, f"this is nested more than {MAX_DEPTH} levels deep: use fewer levels")


def found(node: Node) -> str:
    """A value as messages show it: short, on one line."""
    content = node.content
    if isinstance(content, dict):
        return f"a mapping of {', '.join(list(content)[:4])}{', ...' if len(content) > 4 else ''}" if content else "{}"
    if isinstance(content, tuple):
        return f"a list of {len(content)}" if content else "[]"
    if isinstance(content, str):
        return repr(content if len(content) <= 60 else f"{content[:57]}...")
    if isinstance(content, bool):
        return "true" if content else "false"
    return "null" if content is None else repr(content)


def dotted(parent: str, key: str) -> str:
    """The path of a key, as messages show it."""
    shown = key if key.isprintable() and key else repr(key)
    return f"{parent}.{shown}" if parent else shown


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`. Mappings merge key by key; lists and scalars replace."""
    below, above = base.mapping, over.mapping
    if below is None or above is None:
        return over
    before, after = _selection(below), _selection(above)
    if before and after and before != after:
        return over
    merged = {key: merge(node, above[key]) if key in above else node for key, node in below.items()}
    return Node(merged | {key: node for key, node in above.items() if key not in below}, over.origin)


def _selection(entries: dict[str, Node]) -> tuple[str, Content] | None:
    return next(((key, entries[key].content) for key in _SELECTORS if key in entries), None)


def read_file(path: Path) -> Node:
    """The content of a file: a mapping, empty for an empty file."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise fail(Origin(str(path)), "cannot read the file: it is a pipe or a device; use a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise fail(Origin(str(path)), f"cannot read the file: {reason}") from None
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
    if root.mapping is None:
        raise fail(root.origin, "a project file must be a mapping: lines of `key: value`")
    return root


def read_value(text: str) -> Node:
    """The value of a `key=value` on the command line."""
    return _read(text, lambda *_: COMMAND_LINE)


def checked_text(text: str, origin: Origin) -> str:
    """The text, if it can be encoded again."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise fail(origin, "half of a surrogate pair is not a character: write both halves") from None
    return text


def scalar(text: str, origin: Origin) -> Scalar:
    """The value of an unquoted text by the rules of YAML 1.2: 1e-3 is a number, `no` is a string."""
    if _INTEGER.fullmatch(text):
        if len(text) > _MAX_DIGITS:  # Python refuses to parse thousands of digits
            raise fail(origin, f"a number of {len(text)} digits is too long: the limit is {_MAX_DIGITS}")
        return int(text, 0 if text.startswith(("0x", "0o")) else 10)
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
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
        problem = " ".join(str(part) for part in (error.context, error.problem) if part)
        place = place_of(0, 0) if mark is None else place_of(mark.line, mark.column)
        raise fail(place, f"invalid YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = place_of(before.count("\n"), error.position - before.rfind("\n") - 1)
        raise fail(place, f"the character {error.character:#x} is not allowed: remove it") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # chr() fails for an escape such as "\U00ffffff"
        raise fail(place_of(0, 0), f"invalid YAML: {error}") from None


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML up to its node tree, and from there to ours. The target of an alias is converted once and shared."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.place_of: Callable[[int, int], Origin]
        self._depth = 0
        self._done: dict[int, Node] = {}
        self._open: set[int] = set()

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
        key = id(source)
        if key in self._open:
            raise fail(origin, "this alias refers to a value that contains it")
        if key not in self._done:
            self._open.add(key)
            self._done[key] = Node(self._content(source), origin)
            self._open.remove(key)
        return self._done[key].at(origin)

    def _content(self, source: yaml.Node) -> Content:
        place = self.place(source)
        if source.tag not in (_PLAIN, _OTHER):
            raise fail(place, f"the tag {source.tag!r} is not allowed: remove it")
        if isinstance(source, yaml.ScalarNode):
            text = checked_text(source.value, place)
            return scalar(text, place) if source.tag == _PLAIN else text
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
