"""From a tree of values to typed settings. pydantic checks types, limits and keys; the places are ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic

from paceline.cli.config.aliases import ACCEPTED_IN
from paceline.cli.config.errors import Origin, Problem, nearest
from paceline.cli.config.parts import Part, target_problem
from paceline.cli.config.schema import ProjectSettings, describe, is_section, options_of, settings_of, top_sections
from paceline.cli.config.yaml_tree import Node, dotted, found
from paceline.core.settings import Limits

_INT64 = 2**63


class _Text(str):
    """A text of the file, and the part that it names, if it does."""

    part: Part


class Validation:
    """Validates a tree. settings: None if there are problems. origins: the place of every given value by dotted key."""

    def __init__(self, tree: Node, folder: Path) -> None:
        self.problems: list[Problem] = []
        self.origins: dict[str, Origin] = {"": tree.origin}
        self.settings: ProjectSettings | None = None
        self._folder = folder
        try:
            self.settings = _adapter().validate_python(self._mapping(tree.entries, ""))
        except pydantic.ValidationError as error:
            for each in error.errors(include_url=False, include_input=False, include_context=False):
                self._explain(each["loc"], tree)

    def _data(self, node: Node, key: str, *, is_argument: bool) -> Any:
        """The tree as plain data, except that a mapping with `factory` or `reference` becomes a part."""
        self.origins[key] = node.origin
        content = node.content
        if isinstance(content, dict):
            if "factory" in content or "reference" in content:
                return self._part(content, key)
            return self._mapping(content, key, is_argument=is_argument)
        if isinstance(content, tuple):
            return [self._data(child, f"{key}[{i}]", is_argument=is_argument) for i, child in enumerate(content)]
        if isinstance(content, str) and not is_argument:
            text = _Text(content)
            text.part = Part(content, None, self._folder, key, node.origin)
            return text
        return content

    def _mapping(self, entries: Mapping[str, Node], key: str, *, is_argument: bool = False) -> dict[str, Any]:
        return {
            name: self._data(child, dotted(key, name), is_argument=is_argument or name == "arguments")
            for name, child in entries.items()
        }

    def _part(self, entries: Mapping[str, Node], key: str) -> Part:
        known = ("factory", "arguments") if "factory" in entries else ("reference",)
        for name, child in entries.items():
            self.origins[dotted(key, name)] = child.origin
            if name not in known:
                self._problem(child, dotted(key, name), f"is an unknown setting: {nearest(name, known)}")
        target, path = entries[known[0]], dotted(key, known[0])
        if not isinstance(target.content, str):
            self._problem(target, path, f"is {found(target)}: expected package.module:name")
        elif wrong := target_problem(target.content):
            self._problem(target, path, wrong)
        part = Part(str(target.content), None, self._folder, path, target.origin)
        if known == ("reference",):
            return part
        given, path = entries.get("arguments", Node(None, target.origin)), dotted(key, "arguments")
        if not isinstance(given.content, dict | None):
            self._problem(given, path, f"is {found(given)}: expected a mapping or null")
        return replace(part, arguments=self._mapping(given.entries, path, is_argument=True))

    def _problem(self, node: Node, key: str, message: str) -> None:
        self.problems.append((node.origin, f"{node.origin.alias or key} {message}"))

    def _explain(self, location: tuple[int | str, ...], tree: Node) -> None:
        """Follow pydantic's path, which also names the chosen member of each union, to the value and its type."""
        node, key, hint, limits = tree, "", ProjectSettings, Limits()
        for part in location:
            options = options_of(hint)
            if len(options) > 1:
                hint = options[int(part)]
            elif isinstance(part, int):
                assert isinstance(node.content, tuple)
                node, key, hint = node.content[part], f"{key}[{part}]", get_args(hint)[0]
            else:
                settings, path = settings_of(hint), dotted(key, part)
                if part not in settings:
                    self._problem(node.entries[part], path, f"is an unknown setting: {_meant(part, key, settings)}")
                    return
                hint, _, help, limits = settings[part]
                if part not in node.entries:
                    expected = f"{help} (expected {describe(hint, limits)})"
                    self.problems.append((node.origin, f"{path} is missing: {expected}"))
                    return
                node, key = node.entries[part], path
        self._mismatch(node, key, hint, limits)

    def _mismatch(self, node: Node, key: str, hint: Any, limits: Limits) -> None:
        """Report a value that its type does not allow."""
        options, content = options_of(hint), node.content
        kinds = [option.kind for option in options if is_section(option) and option.kind]
        if kinds and "kind" in node.entries:
            given = node.entries["kind"]
            text = given.content if isinstance(given.content, str) else ""
            self._problem(given, dotted(key, "kind"), f"is {found(given)}: {nearest(text, kinds)}")
        elif isinstance(content, int) and abs(content) >= _INT64 and int in options:
            self._problem(node, key, f"is {found(node)}: expected a number of at most 63 bits")
        else:
            names = [str(c) for o in options if get_origin(o) is Literal for c in get_args(o)] + kinds
            near = get_close_matches(content, names, n=1) if isinstance(content, str) else []
            meant = f"; did you mean {near[0]}?" if near else ""
            if Part in options and isinstance(content, str):
                meant = meant or (target_problem(content) or "").partition("module:name")[2]
            self._problem(node, key, f"is {found(node)}: expected {describe(hint, limits)}{meant}")


def _meant(name: str, section: str, settings: Mapping[str, Any]) -> str:
    """The setting or alias of this name in another section, or the nearest name in this one."""
    sections = [(key, settings_of(kind)) for key, kind in top_sections().items()]
    elsewhere = {inner: f"{key}.{inner}" for key, names in (*sections, *ACCEPTED_IN.items()) for inner in names}
    elsewhere |= {key: key for key in settings_of(ProjectSettings)}
    known = (*settings, *ACCEPTED_IN.get(section, ()))
    return f"did you mean {elsewhere[name]}?" if name in elsewhere else nearest(name, known)


@cache
def _adapter() -> pydantic.TypeAdapter[ProjectSettings]:
    return pydantic.TypeAdapter(_type(ProjectSettings, Limits()))


def _type(hint: Any, limits: Limits) -> Any:
    """The pydantic type for a declared one."""
    options = options_of(hint)
    if len(options) > 1:
        members = [Annotated[_type(option, limits), pydantic.Tag(str(i))] for i, option in enumerate(options)]
        by_form = pydantic.Discriminator(lambda value: _member(options, value))
        return Annotated[Union[tuple(members)], by_form]  # noqa: UP007
    if is_section(hint):
        return _section(hint)
    if hint is Part:
        return Annotated[pydantic.InstanceOf[Part], pydantic.BeforeValidator(_part)]
    if get_origin(hint) is tuple:
        return tuple[_type(get_args(hint)[0], limits), ...]  # type: ignore[misc]
    if hint is int or hint is float:
        low, high = (-_INT64, _INT64 - 1) if hint is int else (None, None)
        bounds = pydantic.Field(
            ge=low if limits.least is None else limits.least,
            gt=limits.above,
            le=high if limits.most is None else limits.most,
            lt=limits.below,
            allow_inf_nan=False if hint is float and limits.finite else None,
        )
        return Annotated[hint, pydantic.Strict(), bounds]
    return Annotated[hint, pydantic.Strict()] if hint in (bool, str) else hint


def _section(section: Any) -> Any:
    settings = settings_of(section)
    declared: Any = {
        name: (_type(s.type, s.limits), ... if s.default is MISSING else s.default) for name, s in settings.items()
    }
    model = pydantic.create_model(section.__name__, __config__=pydantic.ConfigDict(extra="forbid"), **declared)
    made = pydantic.AfterValidator(lambda valid: section(**{name: getattr(valid, name) for name in settings}))
    return Annotated[model, made, pydantic.BeforeValidator(_without_kind)] if section.kind else Annotated[model, made]


def _without_kind(value: Any) -> Any:
    """The name of a kind alone means the kind with its defaults."""
    return {name: item for name, item in value.items() if name != "kind"} if isinstance(value, dict) else {}


def _member(options: tuple[Any, ...], value: Any) -> str | None:
    """The tag of the union's member that a value has the form of."""
    return next((str(i) for i, option in enumerate(options) if _has_form(value, option)), None)


def _has_form(value: Any, option: Any) -> bool:
    if is_section(option):
        return bool((value.get("kind", "") if isinstance(value, dict) else value) == option.kind)
    if get_origin(option) is Literal:
        return isinstance(value, str) and value in get_args(option)
    if option is Part:
        return isinstance(_part(value), Part)
    if form := {tuple: list, Mapping: dict, str: str}.get(get_origin(option) or option):
        return isinstance(value, form)
    return type(value) is option or (option is float and type(value) is int)


def _part(value: Any) -> Any:
    """A text of the form `package.module:name` as a part."""
    return value.part if isinstance(value, _Text) and target_problem(value) is None else value
