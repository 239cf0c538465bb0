"""From a tree of values to typed settings, with every problem on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from paceline.cli.config.errors import DEFAULT, Origin, Problem, nearest
from paceline.cli.config.factories import Factory, Reference, Site, target_problem
from paceline.cli.config.fields import (
    NO_LIMITS,
    Limits,
    describe,
    either,
    is_section,
    kind_of,
    options_of,
    settings_of,
)
from paceline.cli.config.tree import Node, dotted, found

# What comes of a value with a problem; nothing is made of it.
WRONG: Any = object()

_NULL = Node(None, DEFAULT)


class Conversion:
    """Collects `problems`, and for every value its origin by dotted key."""

    def __init__(self, root: type, folder: Path, also_known: Mapping[str, Sequence[str]]) -> None:
        """`also_known` are names that a section takes beside its settings' own."""
        self._homes = _homes(root) | {n: f"{section}.{n}" for section in also_known for n in also_known[section]}
        self._also_known = also_known
        self._folder = folder
        self.problems: list[Problem] = []
        self.origins: dict[str, Origin] = {}

    def value(self, node: Node, hint: Any, key: str = "", limits: Limits = NO_LIMITS) -> Any:
        """The node as a value of this type, WRONG if it is none."""
        options = options_of(hint)
        fitting = [option for option in options if _fits(node, option)]
        if not fitting and node.mapping is not None:
            if any(map(kind_of, options)):
                return self._no_such_kind(node, options, key)
            fitting = [option for option in options if is_section(option) or option is Factory]
        if not fitting:
            return self._problem(node, key, f"is {found(node)}: {_allowed(node, hint, limits)}")
        self.origins[key] = node.origin
        return self._of(node, fitting[0], key, limits)

    def _of(self, node: Node, hint: Any, key: str, limits: Limits) -> Any:
        if is_section(hint):
            return self._section(node, hint, key)
        if hint is Factory:
            return self._factory(node, key)
        if hint is Reference:
            return self._reference(node, key)
        if get_origin(hint) is Mapping:
            num_before = len(self.problems)
            value = self._plain_mapping(node, key)
            return value if len(self.problems) == num_before else WRONG
        if isinstance(node.content, tuple):
            item = get_args(hint)[0]
            items = tuple(self.value(n, item, f"{key}[{i}]", limits) for i, n in enumerate(node.content))
            return WRONG if any(value is WRONG for value in items) else items
        if hint in (int, float):
            return self._number(node, hint, key, limits)
        return node.content

    def _number(self, node: Node, hint: Any, key: str, limits: Limits) -> Any:
        assert isinstance(node.content, int | float)
        if isinstance(node.content, int) and abs(node.content) >= 2**63:
            return self._problem(node, key, f"is {found(node)}: give a number of at most 63 bits")
        number = hint(node.content)
        if not limits.allow(number):
            return self._problem(node, key, f"is {found(node)}: give {describe(hint, limits)}")
        return number

    def _section(self, node: Node, section: Any, key: str) -> Any:
        """A dataclass of settings from a mapping, or from the name of its kind alone."""
        entries = dict(node.mapping or {})
        if kind_of(section):
            self.origins[dotted(key, "kind")] = entries.pop("kind", node).origin
        known = settings_of(section)
        values = {}
        for name, child in entries.items():
            path = dotted(key, name)
            if name not in known:
                self._unknown(child, path, name, (*known, *self._also_known.get(key, ())))
                values[name] = WRONG
            else:
                values[name] = self.value(child, known[name].type, path, known[name].limits)
        for name, setting in known.items():
            if setting.is_required and name not in entries:
                what = f"{dotted(key, name)} is missing: {setting.help} (give {setting.allowed})"
                self.problems.append(Problem(node.origin, what))
                values[name] = WRONG
        return WRONG if any(value is WRONG for value in values.values()) else section(**values)

    def _unknown(self, node: Node, path: str, name: str, known: Sequence[str]) -> None:
        home = self._homes.get(name)
        hint = f"did you mean {home}?" if home is not None else nearest(name, known)
        self._problem(node, path, f"is no setting: {hint}")

    def _no_such_kind(self, node: Node, options: tuple[Any, ...], key: str) -> Any:
        kinds = [kind for option in options if (kind := kind_of(option))]
        given = (node.mapping or {}).get("kind")
        if given is None:
            others = [describe(o) for o in options if o in (Factory, Reference)]
            beside = f", or {either(others)}" if others else ""
            return self._problem(node, key, f"is {found(node)}: give kind: {either(kinds)}{beside}")
        hint = nearest(given.content, kinds) if isinstance(given.content, str) else f"choose from {', '.join(kinds)}"
        return self._problem(given, dotted(key, "kind"), f"is {found(given)}: {hint}")

    def _factory(self, node: Node, key: str) -> Any:
        entries = node.mapping or {}
        if "factory" not in entries:
            return self._problem(node, key, "has no factory: give factory: package.module:name")
        num_before = len(self.problems)
        for name, child in entries.items():
            if name not in ("factory", "arguments"):
                self._problem(child, dotted(key, name), f"is no setting: {nearest(name, ('factory', 'arguments'))}")
        target, path = entries["factory"], dotted(key, "factory")
        name = self._target(target, path)
        arguments = self.value(entries.get("arguments", _NULL), Mapping[str, Any] | None, dotted(key, "arguments"))
        if len(self.problems) > num_before:
            return WRONG
        return Factory(name, arguments or {}, Site(self._folder, path, target.origin))

    def _reference(self, node: Node, key: str) -> Any:
        """From a text, or from a mapping that says that it is one."""
        target = node
        if node.mapping is not None:
            for name, child in node.mapping.items():
                if name != "reference":
                    return self._problem(child, dotted(key, name), "is no setting beside `reference`: remove it")
            key, target = dotted(key, "reference"), node.mapping["reference"]
        name = self._target(target, key)
        return WRONG if name is WRONG else Reference(name, Site(self._folder, key, target.origin))

    def _target(self, node: Node, key: str) -> Any:
        if not isinstance(node.content, str):
            return self._problem(node, key, f"is {found(node)}: give package.module:name")
        wrong = target_problem(node.content)
        self.origins[key] = node.origin
        return self._problem(node, key, wrong) if wrong else node.content

    def _plain(self, node: Node, key: str) -> Any:
        """A value of `arguments`: as it is, but for what names Python."""
        content = node.content
        if isinstance(content, tuple):
            self.origins[key] = node.origin
            return [self._plain(child, f"{key}[{i}]") for i, child in enumerate(content)]
        if not isinstance(content, dict):
            self.origins[key] = node.origin
            return content
        if "factory" in content:
            return self._factory(node, key)
        if "reference" in content:
            return self._reference(node, key)
        return self._plain_mapping(node, key)

    def _plain_mapping(self, node: Node, key: str) -> dict[str, Any]:
        self.origins[key] = node.origin
        return {name: self._plain(child, dotted(key, name)) for name, child in (node.mapping or {}).items()}

    def _problem(self, node: Node, key: str, message: str) -> Any:
        named = node.origin.alias or key
        self.problems.append(Problem(node.origin, f"{named} {message}" if named else message))
        return WRONG


def _fits(node: Node, option: Any) -> bool:
    """Whether a value has the shape of this type; what is inside is looked at later."""
    content, entries = node.content, node.mapping
    if get_origin(option) is Literal:
        return any(type(content) is type(choice) and content == choice for choice in get_args(option))
    if get_origin(option) is tuple:
        return isinstance(content, tuple)
    if get_origin(option) is Mapping:
        return entries is not None
    if option is Factory:
        return entries is not None and "factory" in entries
    if option is Reference:
        return isinstance(content, str) if entries is None else "reference" in entries
    if is_section(option):
        kind = kind_of(option)
        if kind is None:
            return entries is not None
        return content == kind if entries is None else "kind" in entries and entries["kind"].content == kind
    if option is float:
        return type(content) in (int, float)
    return type(content) is option


def _allowed(node: Node, hint: Any, limits: Limits) -> str:
    """What to give instead; the nearest name, where it looks like one of several."""
    names = [str(c) for o in options_of(hint) if get_origin(o) is Literal for c in get_args(o)]
    names += [kind for option in options_of(hint) if (kind := kind_of(option))]
    near = get_close_matches(node.content, names, n=1) if isinstance(node.content, str) else []
    return f"give {describe(hint, limits)}" + (f"; did you mean {near[0]}?" if near else "")


def _homes(root: type) -> dict[str, str]:
    """The dotted key of every setting of a section, by its last part: where a key belongs that stands elsewhere."""
    homes: dict[str, str] = {}
    for name, setting in settings_of(root).items():
        homes.setdefault(name, name)
        if is_section(setting.type):
            for inner in settings_of(setting.type):
                homes.setdefault(inner, f"{name}.{inner}")
    return homes
