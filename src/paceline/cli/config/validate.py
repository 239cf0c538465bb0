"""From a tree of values to typed settings. pydantic checks types, limits and unions; keys and places are ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import pydantic

from paceline.cli.config.aliases import ACCEPTED_IN
from paceline.cli.config.errors import Origin, Problem, nearest
from paceline.cli.config.parts import Part, is_target, meant_target
from paceline.cli.config.schema import ProjectSettings, describe, is_section, options_of, settings_of, top_sections
from paceline.cli.config.yaml_tree import Node, dotted, found
from paceline.core.settings import Limits

_INT64 = 2**63


@dataclass
class Validation:
    """What is known of a tree after `validate`. origins: the place of every given value by dotted key."""

    folder: Path
    problems: list[Problem] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)

    def validate(self, tree: Node) -> ProjectSettings | None:
        """None if there are problems."""
        try:
            settings = _adapter().validate_python(self._value(tree, ""))
        except pydantic.ValidationError:
            return None
        return None if self.problems else settings

    def _value(self, node: Node, key: str) -> _Value:
        self.origins[key] = node.origin
        content: Any = node.content
        if isinstance(content, dict):
            content = {name: self._value(child, dotted(key, name)) for name, child in content.items()}
        elif isinstance(content, tuple):
            content = [self._value(child, f"{key}[{i}]") for i, child in enumerate(content)]
        return _Value(content, key, node, self)


class _Value(NamedTuple):
    """A value as pydantic gets it. content: a scalar, or a list or a dict of values."""

    content: Any
    key: str
    node: Node
    validation: Validation

    @property
    def entries(self) -> dict[str, _Value]:
        """Of a mapping; empty for anything else."""
        return self.content if isinstance(self.content, dict) else {}

    def problem(self, message: str) -> None:
        origin = self.node.origin
        self.validation.problems.append((origin, f"{origin.alias or self.key} {message}"))

    def as_argument(self) -> Any:
        """Plain data, except that a mapping with `factory` or `reference` becomes a part."""
        if isinstance(self.content, list):
            return [item.as_argument() for item in self.content]
        if not isinstance(self.content, dict):
            return self.content
        if "factory" in self.content or "reference" in self.content:
            return self.as_part()
        return {name: item.as_argument() for name, item in self.content.items()}

    def as_part(self) -> Part:
        """Of a target, or of a mapping with `factory` or `reference`."""
        if is_target(self.content):
            return Part(self.content, None, self.validation.folder, self.key, self.node.origin)
        if "factory" not in self.entries and "reference" not in self.entries:
            raise ValueError
        known = ("factory", "arguments") if "factory" in self.content else ("reference",)
        for name, item in self.content.items():
            if name not in known:
                item.problem(f"is an unknown setting: {nearest(name, known)}")
        target, arguments = self.content[known[0]], self.content.get("arguments")
        if not is_target(target.content):
            target.problem(f"is {found(target.node)}: expected package.module:name{meant_target(target.content)}")
        part = Part(str(target.content), None, self.validation.folder, target.key, target.node.origin)
        if known == ("reference",):
            return part
        if arguments is not None and not isinstance(arguments.content, dict | None):
            arguments.problem(f"is {found(arguments.node)}: expected a mapping or null")
        entries = {} if arguments is None else arguments.entries
        return replace(part, arguments={name: item.as_argument() for name, item in entries.items()})


@cache
def _adapter() -> pydantic.TypeAdapter[ProjectSettings]:
    return pydantic.TypeAdapter(_type(ProjectSettings, Limits()))


def _type(hint: Any, limits: Limits) -> Any:
    """The pydantic type for a declared one. It takes a `_Value`, and reports a problem unless one inside of it did."""

    def validate(value: _Value, handler: pydantic.ValidatorFunctionWrapHandler) -> Any:
        num_problems = len(value.validation.problems)
        try:
            return handler(value)
        except pydantic.ValidationError:
            if len(value.validation.problems) == num_problems:
                _report_mismatch(value, hint, limits)
            raise

    options: Any = tuple(_option(option, limits) for option in options_of(hint))
    first = [pydantic.Field(union_mode="left_to_right")] if len(options) > 1 else []
    return Annotated[Union[options], *first, pydantic.WrapValidator(validate)]  # noqa: UP007


def _option(hint: Any, limits: Limits) -> Any:
    """The type for one member of a union, or for a type that is not a union."""
    if is_section(hint):
        return _section(hint)
    if hint is Part:
        return Annotated[Any, pydantic.PlainValidator(_Value.as_part)]
    content = pydantic.BeforeValidator(lambda value: value.content)
    if get_origin(hint) is tuple:
        return Annotated[tuple[_type(get_args(hint)[0], limits), ...], content]  # type: ignore[misc]
    if get_origin(hint) is Mapping:
        return Annotated[dict[str, Annotated[Any, pydantic.PlainValidator(_Value.as_argument)]], content]
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

    def validate(value: _Value, handler: pydantic.ValidatorFunctionWrapHandler) -> Any:
        kind = value.entries["kind"].content if "kind" in value.entries else ""
        if (kind if isinstance(value.content, dict) else value.content or None) != section.kind:
            raise ValueError  # the name of a kind alone means the kind with its defaults
        for name, setting in settings.items():
            if setting.default is MISSING and name not in value.entries:
                expected = f"{setting.help} (expected {describe(setting.type, setting.limits)})"
                problem = f"{dotted(value.key, name)} is missing: {expected}"
                value.validation.problems.append((value.node.origin, problem))
        try:
            return section(**dict(handler({name: item for name, item in value.entries.items() if name in settings})))
        finally:
            for name, item in value.entries.items():
                if name not in settings and name != "kind":
                    item.problem(f"is an unknown setting: {_meant(name, value.key, settings)}")

    return Annotated[pydantic.create_model(section.__name__, **declared), pydantic.WrapValidator(validate)]


def _meant(name: str, section: str, settings: Mapping[str, Any]) -> str:
    """The setting or alias of this name in another section, or the nearest name in this one."""
    sections = [(key, settings_of(kind)) for key, kind in top_sections().items()]
    elsewhere = {inner: f"{key}.{inner}" for key, names in (*sections, *ACCEPTED_IN.items()) for inner in names}
    elsewhere |= {key: key for key in settings_of(ProjectSettings)}
    known = (*settings, *ACCEPTED_IN.get(section, ()))
    return f"did you mean {elsewhere[name]}?" if name in elsewhere else nearest(name, known)


def _report_mismatch(value: _Value, hint: Any, limits: Limits) -> None:
    options, content = options_of(hint), value.content
    kinds = [option.kind for option in options if is_section(option) and option.kind]
    if kinds and (given := value.entries.get("kind")):
        given.problem(f"is {found(given.node)}: {nearest(str(given.content), kinds)}")
    elif isinstance(content, int) and abs(content) >= _INT64 and int in options:
        value.problem(f"is {found(value.node)}: expected a number of at most 63 bits")
    else:
        names = [str(c) for o in options if get_origin(o) is Literal for c in get_args(o)] + kinds
        near = get_close_matches(content, names, n=1) if isinstance(content, str) else []
        meant = f"; did you mean {near[0]}?" if near else meant_target(content) if Part in options else ""
        value.problem(f"is {found(value.node)}: expected {describe(hint, limits)}{meant}")
