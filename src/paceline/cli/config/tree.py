"""What a YAML text says, with the place of every value."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.cli.config.errors import ConfigError, Origin, fail

# Anchors and variables can make a short file say very much: these bounds are far above what anybody writes.
MAX_VALUES = 100_000
MAX_DEPTH = 64
MAX_TEXT = 100_000

# A mapping that chooses something else than the one it is merged into has nothing in common with it.
_SELECTORS = ("factory", "reference", "kind")

Scalar: TypeAlias = str | int | float | bool | None
Content: TypeAlias = "Scalar | tuple[Node, ...] | dict[str, Node]"


@dataclass(frozen=True, eq=False)
class Node:
    """A scalar, a list or a mapping. A mapping's value stands where its key does, an item of a list where it begins."""

    content: Content
    origin: Origin
    num_values: int = field(init=False)
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        children = self.children
        object.__setattr__(self, "num_values", 1 + sum(child.num_values for child in children))
        object.__setattr__(self, "depth", 1 + max((child.depth for child in children), default=0))
        if self.num_values > MAX_VALUES:
            raise fail(self.origin, f"with what it refers to this has more than {MAX_VALUES} values: write less")
        if self.depth > MAX_DEPTH:
            raise too_deep(self.origin)

    @property
    def children(self) -> tuple[Node, ...]:
        if isinstance(self.content, dict):
            return tuple(self.content.values())
        return self.content if isinstance(self.content, tuple) else ()

    @property
    def mapping(self) -> dict[str, Node] | None:
        """The entries, if it is a mapping."""
        return self.content if isinstance(self.content, dict) else None

    def at(self, origin: Origin) -> Node:
        """The same content, somewhere else."""
        moved = copy(self)  # not made anew: its size is known, and its parts may be many
        object.__setattr__(moved, "origin", origin)
        return moved


def too_deep(origin: Origin) -> ConfigError:
    return fail(origin, f"this is nested more than {MAX_DEPTH} levels deep: write it flatter")


def found(node: Node) -> str:
    """A value as messages name it: short, on one line."""
    content = node.content
    if isinstance(content, dict):
        return f"a mapping of {', '.join(list(content)[:4])}{', ...' if len(content) > 4 else ''}" if content else "{}"
    if isinstance(content, tuple):
        return f"a list of {len(content)}"
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
    """What `over` says, and beside it what only `base` says. Mappings merge; lists and scalars replace."""
    below, above = base.mapping, over.mapping
    if below is None or above is None or _selects_another(below, above):
        return over
    merged = {key: merge(node, above[key]) if key in above else node for key, node in below.items()}
    return Node(merged | {key: node for key, node in above.items() if key not in below}, over.origin)


def _selects_another(below: dict[str, Node], above: dict[str, Node]) -> bool:
    before, after = _selection(below), _selection(above)
    return before is not None and after is not None and before != after


def _selection(entries: dict[str, Node]) -> tuple[str, Content] | None:
    return next(((key, entries[key].content) for key in _SELECTORS if key in entries), None)
