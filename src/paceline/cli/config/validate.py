"""Turns a tree of values into typed settings. pydantic checks types, limits and unions, this module tracks origins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic

from paceline.cli.config.aliases import ACCEPTED_IN, SIMILAR
from paceline.cli.config.errors import Origin, Problem, nearest
from paceline.cli.config.parts import Part, is_target, meant_target
from paceline.cli.config.schema import ProjectSettings, describe, is_section, options_of, settings_of, top_sections
from paceline.cli.config.yaml_tree import Node, dotted, found
from paceline.core.settings import Limits

_INT64 = 2**63


@dataclass
class Validation:
    """The result of `validate`. origins: the place of every given value by dotted key."""

    folder: Path
    problems: list[Problem] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)

    def validate(self, tree: Node) -> ProjectSettings | None:
        """None if there are problems."""
        try:
            settings = _adapter().validate_python(self._with_keys(tree, ""), context=self)
        except pydantic.ValidationError:
            return None
        return None if self.problems else settings

    def _with_keys(self, node: Node, key: str) -> Node:
        self.origins[key] = node.origin
        content = node.content
        if isinstance(content, dict):
            content = {name: self._with_keys(child, dotted(key, name)) for name, child in content.items()}
        elif isinstance(content, tuple):
            content = tuple(self._with_keys(child, f"{key}[{i}]") for i, child in enumerate(content))
        return Node(content, node.origin, key)

    def problem(self, node: Node, message: str) -> None:
        self.problems.append((node.origin, f"{node.origin.alias or node.key} {message}"))

    def argument(self, node: Node) -> Any:
        """Plain data, except that a mapping with `factory` or `reference` becomes a part."""
        if isinstance(node.content, tuple):
            return [self.argument(item) for item in node.content]
        if not isinstance(node.content, dict):
            return node.content
        if "factory" in node.entries or "reference" in node.entries:
            return self.part(node)
        return {name: self.argument(item) for name, item in node.entries.items()}

    def part(self, node: Node) -> Part:
        """Of a target, or of a mapping with `factory` or `reference`."""
        if is_target(node.content):
            return Part(str(node.content), None, self.folder, node.key, node.origin)
        if "factory" not in node.entries and "reference" not in node.entries:
            raise ValueError
        known = ("factory", "arguments") if "factory" in node.entries else ("reference",)
        for name, item in node.entries.items():
            if name not in known:
                self.problem(item, f"is an unknown setting: {nearest(name, known)}")
        target = node.entries[known[0]]
        if not is_target(target.content):
            self.problem(target, f"is {found(target)}: expected package.module:name{meant_target(target.content)}")
        part = Part(str(target.content), None, self.folder, target.key, target.origin)
        if known == ("reference",):
            return part
        given = node.entries.get("arguments", Node({}, node.origin))
        if not isinstance(given.content, dict | None):
            self.problem(given, f"is {found(given)}: expected a mapping or null")
        return replace(part, arguments={name: self.argument(item) for name, item in given.entries.items()})

    def mismatch(self, node: Node, hint: Any, limits: Limits) -> None:
        """Report a value that its type does not allow."""
        options, content = options_of(hint), node.content
        kinds = [option.kind for option in options if is_section(option) and option.kind]
        if kinds and (given := node.entries.get("kind")):
            self.problem(given, f"is {found(given)}: {nearest(str(given.content), kinds)}")
        elif isinstance(content, int) and abs(content) >= _INT64 and int in options:
            self.problem(node, f"is {found(node)}: expected a number of at most 63 bits")
        else:
            names = [str(c) for o in options if get_origin(o) is Literal for c in get_args(o)] + kinds
            near = get_close_matches(content, names, n=1) if isinstance(content, str) else []
            meant = f"; did you mean {near[0]}?" if near else meant_target(content) if Part in options else ""
            self.problem(node, f"is {found(node)}: expected {describe(hint, limits)}{meant}")


@cache
def _adapter() -> pydantic.TypeAdapter[ProjectSettings]:
    return pydantic.TypeAdapter(_type(ProjectSettings, Limits()))


# In the functions below, info.context is the Validation.


def _type(hint: Any, limits: Limits) -> Any:
    """The pydantic type for a declared one. It takes a node, and reports a problem unless an inner one did."""

    def validate(node: Node, handler: Any, info: Any) -> Any:
        num_problems = len(info.context.problems)
        try:
            return handler(node)
        except pydantic.ValidationError:
            if len(info.context.problems) == num_problems:
                info.context.mismatch(node, hint, limits)
            raise

    options: Any = tuple(_option(option, limits) for option in options_of(hint))
    mode = [pydantic.Field(union_mode="left_to_right")] if len(options) > 1 else []
    return Annotated[Union[options], *mode, pydantic.WrapValidator(validate)]  # noqa: UP007


def _option(hint: Any, limits: Limits) -> Any:
    """The type for one member of a union, or for a type that is not a union."""
    if is_section(hint):
        return _section(hint)
    if hint is Part:
        return Annotated[Any, pydantic.PlainValidator(lambda node, info: info.context.part(node))]
    content = pydantic.BeforeValidator(lambda node: node.content)
    if get_origin(hint) is tuple:
        return Annotated[tuple[_type(get_args(hint)[0], limits), ...], content]  # type: ignore[misc]
    if get_origin(hint) is Mapping:
        argument = pydantic.PlainValidator(lambda node, info: info.context.argument(node))
        return Annotated[dict[str, Annotated[Any, argument]], content]
    if hint not in (int, float):
        return Annotated[hint, pydantic.Strict(), content] if hint in (bool, str) else Annotated[hint, content]

    def in_limits(number: float) -> float:
        if not limits.allow(number) or (hint is int and abs(number) >= _INT64):
            raise ValueError
        return number

    return Annotated[hint, pydantic.Strict(), content, pydantic.AfterValidator(in_limits)]


def _section(section: Any) -> Any:
    settings = settings_of(section)
    declared: Any = {
        name: (_type(s.type, s.limits), ... if s.default is MISSING else s.default) for name, s in settings.items()
    }

    def validate(node: Node, handler: Any, info: Any) -> Any:
        kind = node.entries["kind"].content if "kind" in node.entries else ""
        if (kind if isinstance(node.content, dict) else node.content or None) != section.kind:
            raise ValueError  # the name of a kind alone means the kind with its defaults
        for name, setting in settings.items():
            if setting.default is MISSING and name not in node.entries:
                expected = f"{setting.help} (expected {describe(setting.type, setting.limits)})"
                info.context.problems.append((node.origin, f"{dotted(node.key, name)} is missing: {expected}"))
        try:
            return section(**dict(handler({name: item for name, item in node.entries.items() if name in settings})))
        finally:
            for name, item in node.entries.items():
                if name not in settings and name != "kind":
                    info.context.problem(item, f"is an unknown setting: {_meant(name, node.key, settings)}")

    return Annotated[pydantic.create_model(section.__name__, **declared), pydantic.WrapValidator(validate)]


def _meant(name: str, section: str, settings: Mapping[str, Any]) -> str:
    """The setting or alias of this name in another section or of another tool, or the nearest name in this one."""
    sections = [(key, settings_of(kind)) for key, kind in top_sections().items()]
    elsewhere = {inner: f"{key}.{inner}" for key, names in (*sections, *ACCEPTED_IN.items()) for inner in names}
    elsewhere |= SIMILAR | {key: key for key in settings_of(ProjectSettings)}
    known = (*settings, *ACCEPTED_IN.get(section, ()))
    return f"did you mean {elsewhere[name]}?" if name in elsewhere else nearest(name, known)
