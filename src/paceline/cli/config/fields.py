"""What a setting is: its type, its bounds, what it is for. Declared once, on the fields of the schema's dataclasses."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.cli.config.factories import Factory, Reference

_PLURALS = {bool: "true or false", int: "whole numbers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class Limits:
    """Bounds of a number, or of every number of a list. `finite`: inf and NaN are no values."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    finite: bool = True

    def allow(self, value: float) -> bool:
        return (
            (math.isfinite(value) if self.finite else not math.isnan(value))
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = ((">=", self.least), (">", self.above), ("<=", self.most), ("<", self.below))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


NO_LIMITS = Limits()


def setting(
    help: str,
    default: Any = MISSING,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    finite: bool = True,
) -> Any:
    """A field of a section. Without a default it must be given."""
    limits = Limits(least, above, most, below, finite)
    metadata = {"help": help, "limits": limits}
    if is_dataclass(default) and isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """A field of a section, as converters and pages want it."""

    name: str
    type: Any
    default: Any  # MISSING where it must be given
    help: str
    limits: Limits

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def allowed(self) -> str:
        return describe(self.type, self.limits)


@cache
def settings_of(section: type) -> dict[str, Setting]:
    """The settings of a section by name, in order."""
    hints = get_type_hints(section)
    return {f.name: _setting_of(f, hints[f.name]) for f in fields(section) if "help" in f.metadata}


def _setting_of(f: Field[Any], hint: Any) -> Setting:
    default = f.default if f.default_factory is MISSING else f.default_factory()
    return Setting(f.name, hint, default, f.metadata["help"], f.metadata["limits"])


def options_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else, itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_section(hint: Any) -> bool:
    """Whether a value of this type is a mapping with settings of its own."""
    return is_dataclass(hint) and hint not in (Factory, Reference)


def kind_of(section: Any) -> str | None:
    """What `kind:` names it by, where a setting may be one of several sections."""
    return getattr(section, "KIND", None)


def describe(hint: Any, limits: Limits = NO_LIMITS) -> str:
    """What is allowed, in words: "a whole number >= 1 or null"."""
    return either([word for option in options_of(hint) for word in _words(option, limits)])


def either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _words(option: Any, limits: Limits) -> Iterator[str]:
    origin = get_origin(option)
    bound = f" {limits}" if str(limits) else ""
    if origin is Literal:
        yield from map(str, get_args(option))
    elif origin is tuple:
        yield f"a list of {_plural(get_args(option)[0])}{bound}"
    elif origin is Mapping:
        yield "a mapping"
    elif option is int or option is float:
        yield f"a {'whole ' if option is int else ''}number{bound}"
    elif option is Factory:
        yield "a factory"
    elif option is Reference:
        yield "package.module:name"
    elif is_section(option):
        kind = kind_of(option)
        yield f"a mapping of {', '.join(settings_of(option))}" if kind is None else f"kind: {kind}"
    else:
        yield {bool: "true or false", str: "text", types.NoneType: "null"}[option]


def _plural(hint: Any) -> str:
    return _PLURALS.get(hint) or describe(hint)
