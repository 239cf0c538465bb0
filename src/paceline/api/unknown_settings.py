"""What to say about a keyword that `Trainer.setup` does not have: most are settings of a group."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from paceline.run.saving.options import Checkpoints
from paceline.run.settings import GROUPS

P = ParamSpec("P")
R = TypeVar("R")

_KINDS: dict[str, type[Any]] = {**GROUPS, "checkpoints": Checkpoints}
_GROUP_OF = {field.name: group for group, kind in _KINDS.items() for field in fields(kind) if field.name != "folder"}


def explains_unknown_settings(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function raise TypeError with the group that an unknown keyword belongs to, and for what is no group."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        for name, value in keywords.items():
            if name not in known:
                raise TypeError(explanation(name, value, list(known)))
            check_group(name, value)
        return function(*args, **keywords)

    return checked


def check_group(name: str, value: Any) -> None:
    """Refuse a value of another type for a group of settings."""
    if (kind := _KINDS.get(name)) and not isinstance(value, kind) and (value is not None or kind is not Checkpoints):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass {name}=pl.{kind.__name__}(...)")


def explanation(name: str, value: Any, known: list[str]) -> str:
    """`readers is a setting of Loading: pass loading=pl.Loading(readers=2)`."""
    if group := _GROUP_OF.get(name):
        kind = group.capitalize()
        shown = "..." if callable(value) or len(repr(value)) > 40 else repr(value)
        folder = "folder, " if kind == "Checkpoints" else ""
        return f"{name} is a setting of {kind}: pass {group}=pl.{kind}({folder}{name}={shown})"
    near = difflib.get_close_matches(name, [*known, *_GROUP_OF], 1)
    if not near:
        return f"unknown setting {name!r}"
    hint = _GROUP_OF.get(near[0])
    return f"unknown setting {name!r}: did you mean {near[0]}{f' of pl.{hint.capitalize()}' if hint else ''}?"
