"""From a tree of values to typed settings. pydantic checks types, limits and unknown keys; the places are ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    InstanceOf,
    Strict,
    Tag,
    TypeAdapter,
    ValidationError,
    create_model,
)

from paceline.cli.config.errors import Origin, Problem, nearest
from paceline.cli.config.factories import Factory, Reference, Site, target_problem
from paceline.cli.config.schema import Settings, describe, is_section, options_of, settings_of
from paceline.cli.config.yaml_tree import Node, dotted, found
from paceline.core.settings import Limits

_INTEGER_LIMIT = 2**63


class _Text(str):
    """A text of the file that knows where it is, in case it names a part."""

    site: Site


class Validation:
    """Validates a tree. settings: None if there are problems. origins: the place of every given value by dotted key.

    aliases: names that a section accepts in addition to those of its settings.
    """

    def __init__(self, tree: Node, folder: Path, aliases: Mapping[str, Sequence[str]]) -> None:
        self.problems: list[Problem] = []
        self.origins: dict[str, Origin] = {"": tree.origin}
        self.settings: Settings | None = None
        self._folder = folder
        self._aliases = aliases
        data = self._mapping(tree.mapping or {}, "")
        try:
            self.settings = _adapter().validate_python(data)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False, include_context=False)
            self.problems += [self._explain(each["loc"], tree) for each in errors]

    def _data(self, node: Node, key: str, *, is_argument: bool) -> Any:
        """The tree as plain data, except that a mapping with `factory` or `reference` becomes a part."""
        self.origins[key] = node.origin
        content = node.content
        if isinstance(content, dict):
            if "factory" in content:
                return self._part(content, key, "factory", ("factory", "arguments"))
            if "reference" in content:
                return self._part(content, key, "reference", ("reference",))
            return self._mapping(content, key, is_argument=is_argument)
        if isinstance(content, tuple):
            return [self._data(child, f"{key}[{i}]", is_argument=is_argument) for i, child in enumerate(content)]
        if isinstance(content, str) and not is_argument:
            text = _Text(content)
            text.site = Site(self._folder, key, node.origin)
            return text
        return content

    def _mapping(self, entries: Mapping[str, Node], key: str, *, is_argument: bool = False) -> dict[str, Any]:
        return {
            name: self._data(child, dotted(key, name), is_argument=is_argument or name == "arguments")
            for name, child in entries.items()
        }

    def _part(self, entries: Mapping[str, Node], key: str, word: str, known: tuple[str, ...]) -> Factory | Reference:
        for name, child in entries.items():
            if name not in known:
                unknown = f"is an unknown setting: {nearest(name, known)}"
                self.problems.append(_problem(child, dotted(key, name), unknown))
        target, path = entries[word], dotted(key, word)
        self.origins[path] = target.origin
        if wrong := _target_problem(target):
            self.problems.append(_problem(target, path, wrong))
        site = Site(self._folder, path, target.origin)
        if word == "reference":
            return Reference(str(target.content), site)
        given, path = entries.get("arguments"), dotted(key, "arguments")
        if given is None or given.content is None:
            return Factory(str(target.content), {}, site)
        if given.mapping is None:
            self.problems.append(_problem(given, path, f"is {found(given)}: expected a mapping or null"))
        self.origins[path] = given.origin
        return Factory(str(target.content), self._mapping(given.mapping or {}, path, is_argument=True), site)

    def _explain(self, location: tuple[int | str, ...], tree: Node) -> Problem:
        """Follow pydantic's path, which also names the chosen member of each union, to the value and its type."""
        node, key, hint, limits = tree, "", Settings, Limits()
        for part in location:
            options = options_of(hint)
            if len(options) > 1:
                hint = options[int(part)]
            elif isinstance(part, int):
                assert isinstance(node.content, tuple)
                node, key, hint = node.content[part], f"{key}[{part}]", get_args(hint)[0]
            else:
                setting, child, path = settings_of(hint).get(part), (node.mapping or {}).get(part), dotted(key, part)
                if child is None:
                    assert setting is not None
                    return Problem(
                        node.origin,
                        f"{path} is missing: {setting.help} (expected {describe(setting.type, setting.limits)})",
                    )
                if setting is None:
                    known = (*settings_of(hint), *self._aliases.get(key, ()))
                    home = self._homes().get(part)
                    meant = f"did you mean {home}?" if home else nearest(part, known)
                    return _problem(child, path, f"is an unknown setting: {meant}")
                node, key, hint, limits = child, path, setting.type, setting.limits
        return _mismatch(node, key, hint, limits)

    def _homes(self) -> dict[str, str]:
        """The dotted key of every setting and alias by its last part: where a misplaced key belongs."""
        sections = {name: setting.type for name, setting in settings_of(Settings).items()}
        homes = {n: f"{name}.{n}" for name, hint in sections.items() if is_section(hint) for n in settings_of(hint)}
        aliases = {name: f"{section}.{name}" for section, names in self._aliases.items() for name in names}
        return homes | aliases | {name: name for name in sections}


def _problem(node: Node, key: str, message: str) -> Problem:
    return Problem(node.origin, f"{node.origin.alias or key} {message}")


def _target_problem(node: Node) -> str | None:
    if isinstance(node.content, str):
        return target_problem(node.content)
    return f"is {found(node)}: expected package.module:name"


def _mismatch(node: Node, key: str, hint: Any, limits: Limits) -> Problem:
    """A value that its type does not allow."""
    options, content = options_of(hint), node.content
    kinds = [option.kind for option in options if is_section(option) and option.kind]
    given = (node.mapping or {}).get("kind")
    if given is not None and kinds:
        text = given.content if isinstance(given.content, str) else ""
        return _problem(given, dotted(key, "kind"), f"is {found(given)}: {nearest(text, kinds)}")
    if hint is Reference and isinstance(content, str):
        return _problem(node, key, target_problem(content) or "")
    if isinstance(content, int) and abs(content) >= _INTEGER_LIMIT and {int, float}.intersection(options):
        return _problem(node, key, f"is {found(node)}: expected a number of at most 63 bits")
    names = [str(c) for o in options if get_origin(o) is Literal for c in get_args(o)] + kinds
    near = get_close_matches(content, names, n=1) if isinstance(content, str) else []
    meant = f"; did you mean {near[0]}?" if near else ""
    return _problem(node, key, f"is {found(node)}: expected {describe(hint, limits)}{meant}")


@cache
def _adapter() -> TypeAdapter[Settings]:
    return TypeAdapter(_type(Settings, Limits()))


def _type(hint: Any, limits: Limits) -> Any:
    """The pydantic type for a declared one."""
    options = options_of(hint)
    if len(options) > 1:
        members = [Annotated[_type(option, limits), Tag(str(i))] for i, option in enumerate(options)]
        return Annotated[Union[tuple(members)], Discriminator(lambda value: _member(options, value))]  # noqa: UP007
    if is_section(hint):
        return _section(hint)
    if hint is Factory:
        return InstanceOf[Factory]
    if hint is Reference:
        return Annotated[InstanceOf[Reference], BeforeValidator(_reference)]
    if get_origin(hint) is tuple:
        return tuple[_type(get_args(hint)[0], limits), ...]  # type: ignore[misc]
    if hint in (int, float):
        bounds = ((Ge, limits.least), (Gt, limits.above), (Le, limits.most), (Lt, limits.below))
        given: list[Any] = [bound(value) for bound, value in bounds if value is not None]
        if hint is float and limits.finite:
            given.append(AllowInfNan(False))
        return Annotated[(hint, Strict(), *given, BeforeValidator(_check_range))]
    return Annotated[hint, Strict()] if hint in (bool, str) else hint


def _section(section: Any) -> Any:
    settings = settings_of(section)
    declared: Any = {
        name: (_type(s.type, s.limits), ... if s.default is MISSING else s.default) for name, s in settings.items()
    }
    model = create_model(section.__name__, __config__=ConfigDict(extra="forbid"), **declared)
    made = AfterValidator(lambda valid: section(**{name: getattr(valid, name) for name in settings}))
    return Annotated[model, made, BeforeValidator(_without_kind)] if section.kind else Annotated[model, made]


def _without_kind(value: Any) -> Any:
    """The name of a kind alone means the kind with its defaults."""
    return {name: item for name, item in value.items() if name != "kind"} if isinstance(value, dict) else {}


def _member(options: tuple[Any, ...], value: Any) -> str | None:
    """The member of a union that a value has the form of."""
    return next((str(i) for i, option in enumerate(options) if _has_form(value, option)), None)


def _has_form(value: Any, option: Any) -> bool:
    if is_section(option):
        return bool((value.get("kind", "") if isinstance(value, dict) else value) == option.kind)
    if get_origin(option) is Literal:
        return isinstance(value, str) and value in get_args(option)
    if option is Reference:
        return isinstance(value, Reference | _Text)
    if option is float:
        return type(value) in (int, float)
    if option is str:
        return isinstance(value, str)
    forms = {tuple: list, Mapping: dict}
    return type(value) is forms.get(get_origin(option), option)


def _reference(value: Any) -> Any:
    if not isinstance(value, _Text):
        return value
    if target_problem(value):
        raise ValueError
    return Reference(str(value), value.site)


def _check_range(value: Any) -> Any:
    if isinstance(value, int) and abs(value) >= _INTEGER_LIMIT:
        raise ValueError
    return value
