"""YAML texts as trees of values with places. Nothing is run, and no tag is known."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import yaml  # type: ignore[import-untyped]
from yaml.composer import Composer  # type: ignore[import-untyped]
from yaml.parser import Parser  # type: ignore[import-untyped]
from yaml.reader import Reader, ReaderError  # type: ignore[import-untyped]
from yaml.scanner import Scanner  # type: ignore[import-untyped]

from paceline.cli.config.errors import COMMAND_LINE, ConfigError, Origin, fail
from paceline.cli.config.tree import MAX_DEPTH, Node, Scalar, too_deep

MAX_FILE_BYTES = 1 << 18

_NULL = re.compile(r"|~|null|Null|NULL")
_TRUE, _FALSE = re.compile("true|True|TRUE"), re.compile("false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL, _HEXADECIMAL = re.compile("0o[0-7]+"), re.compile("0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY, _NAN = re.compile(r"[-+]?\.(inf|Inf|INF)"), re.compile(r"\.(nan|NaN|NAN)")

_MAX_DIGITS = 40
_PLAIN, _OTHER = "plain", "other"

OriginOf: TypeAlias = Callable[[yaml.Mark], Origin]


def read_file(path: Path) -> Node:
    """What a file says; a mapping, empty if the file is."""
    start = Origin(str(path), 1, 1)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise fail(
                Origin(str(path)), "the file cannot be read: it is a pipe or a device; save the project in a file"
            )
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise fail(Origin(str(path)), f"the file cannot be read: {reason}") from None
    if len(data) > MAX_FILE_BYTES:
        raise fail(start, f"the file has more than {MAX_FILE_BYTES} bytes: a project file is small")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise fail(
            Origin(str(path), line, column), f"byte {data[error.start]:#04x} is not UTF-8: save the file as UTF-8"
        ) from None
    root = _read(text, lambda mark: Origin(str(path), mark.line + 1, mark.column + 1))
    if root is None or root.content is None:
        return Node({}, start)
    if root.mapping is None:
        raise fail(root.origin, "a project file is a mapping, lines of `key: value`")
    return root


def read_value(text: str) -> Node:
    """What the text of a `key=value` on the command line says."""
    root = _read(text, lambda _: COMMAND_LINE)
    return Node(None, COMMAND_LINE) if root is None else root


def checked_text(text: str, origin: Origin) -> str:
    """The text, all of which can be written again."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise fail(origin, "half of a surrogate pair is no character: write the whole one") from None
    return text


def scalar(text: str, origin: Origin) -> Scalar:
    """An unquoted text, by the rules of YAML 1.2: 1e-3 is a number, and `no` is a text."""
    if _INTEGER.fullmatch(text) or _HEXADECIMAL.fullmatch(text) or _OCTAL.fullmatch(text):
        if len(text) > _MAX_DIGITS:  # Python refuses some thousands
            raise fail(origin, f"a number of {len(text)} digits is too long")
        return int(text, 0 if text.startswith(("0x", "0o")) else 10)
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text) or _FALSE.fullmatch(text):
        return text.lower() == "true"
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITY.fullmatch(text) or _NAN.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _read(text: str, origin_of: OriginOf) -> Node | None:
    try:
        root = _Loader(text, origin_of).get_single_node()
        return None if root is None else _Construction(origin_of).node(root, origin_of(root.start_mark))
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(part) for part in (error.context, error.problem) if part)
        raise fail(_start(origin_of) if mark is None else origin_of(mark), f"this is not YAML: {problem}") from None
    except ReaderError as error:
        before = text[: error.position]
        place = yaml.Mark("", 0, before.count("\n"), error.position - before.rfind("\n") - 1, None, None)
        raise fail(origin_of(place), f"the character {error.character:#x} is not allowed: remove it") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # of chr(), for an escape such as "\U00ffffff"
        raise fail(_start(origin_of), f"this is not YAML: {error}") from None


def _start(origin_of: OriginOf) -> Origin:
    return origin_of(yaml.Mark("", 0, 0, 0, None, None))


class _Loader(Reader, Scanner, Parser, Composer):  # type: ignore[misc]
    """PyYAML up to its tree of nodes, with a tag for each that only tells whether a scalar is plain."""

    def __init__(self, text: str, origin_of: OriginOf) -> None:
        self._origin_of = origin_of
        self._depth = 0
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Ends what is nested too deeply here: PyYAML would go on until the stack is full, and slowly."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise too_deep(self._origin_of(self.peek_event().start_mark))
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        return _PLAIN if kind is yaml.ScalarNode and implicit[0] else _OTHER

    def descend_resolver(self, *_: object) -> None:
        """Tags do not depend on where a node stands."""

    ascend_resolver = descend_resolver


class _Construction:
    """From PyYAML's nodes to ours. What an alias refers to is made once, and shared."""

    def __init__(self, origin_of: OriginOf) -> None:
        self._origin_of = origin_of
        self._done: dict[int, Node] = {}
        self._open: set[int] = set()

    def node(self, source: yaml.Node, origin: Origin) -> Node:
        key = id(source)
        if key in self._open:
            raise fail(origin, "this alias refers to what it is a part of")
        if key not in self._done:
            self._open.add(key)
            self._done[key] = self._made(source, origin)
            self._open.remove(key)
        return self._done[key].at(origin)

    def _made(self, source: yaml.Node, origin: Origin) -> Node:
        if source.tag not in (_PLAIN, _OTHER):
            raise fail(self._origin_of(source.start_mark), f"the tag {source.tag!r} is not allowed: leave it out")
        if isinstance(source, yaml.ScalarNode):
            return Node(self._scalar(source), origin)
        if isinstance(source, yaml.SequenceNode):
            return Node(tuple(self.node(item, self._origin_of(item.start_mark)) for item in source.value), origin)
        entries: dict[str, Node] = {}
        for key_source, value in source.value:
            place = self._origin_of(key_source.start_mark)
            key = self._key(key_source, place)
            if key in entries:
                raise fail(place, f"the key {key!r} is there twice, first at {entries[key].origin}: remove one")
            entries[key] = self.node(value, place)
        return Node(entries, origin)

    def _key(self, source: yaml.Node, place: Origin) -> str:
        key = self._scalar(source) if isinstance(source, yaml.ScalarNode) else None
        if not isinstance(key, str) or source.tag not in (_PLAIN, _OTHER):
            raise fail(place, "a key must be a text: put it in quotes")
        if key == "<<":
            raise fail(place, "merge keys (<<) are not read: use `extends` or a variable")
        return key

    def _scalar(self, source: yaml.ScalarNode) -> Scalar:
        place = self._origin_of(source.start_mark)
        text = checked_text(source.value, place)
        return scalar(text, place) if source.tag == _PLAIN else text
