"""How a setting is declared: once, as a field of a frozen dataclass, with its help text and its limits.

`Trainer.setup`, the builder, project files and `--help` all derive from these declarations.
"""

from __future__ import annotations

import math
import types
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Limits:
    """Bounds of a number, or of every number of a list. finite: refuse inf; NaN is always refused."""

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


def setting(
    help: str,
    default: Any = MISSING,
    *,
    course: bool = False,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    finite: bool = True,
) -> Any:
    """A field of a group of settings. Without a default, a value is required.

    course: the setting affects the course of a run. It is stored in checkpoints and compared on resume; all other
    settings may change from one start to the next.
    """
    metadata = {"help": help, "limits": Limits(least, above, most, below, finite), "course": course}
    if is_dataclass(default) and isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def check(group: Any) -> None:
    """Raise ValueError for the first value of a group that its declaration does not allow."""
    hints = get_type_hints(type(group))
    for declared in fields(group):
        if "limits" in declared.metadata:
            _check(declared.name, getattr(group, declared.name), hints[declared.name], declared.metadata["limits"])


def _check(name: str, value: Any, hint: Any, limits: Limits) -> None:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    if isinstance(value, str) and choices and str not in options and value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: choose {' or '.join(map(repr, choices))}")
    if bool not in options and isinstance(value, bool) and (int in options or float in options):
        raise ValueError(f"{name}={value!r} must be a number")
    for number in value if isinstance(value, tuple) else (value,):
        if int in options and float not in options and isinstance(number, float):
            raise ValueError(f"{name}={value!r} must be an int")
        if isinstance(number, int | float) and not isinstance(number, bool) and not limits.allow(number):
            raise ValueError(f"{name}={value!r} must be {str(limits) or 'finite'}")
