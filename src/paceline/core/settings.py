"""How a setting is declared: once, as a field of a frozen dataclass, with its help text and its limits.

`Trainer.setup`, the builder, project files and `--help` all derive from these declarations.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
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


def setting(help: str, default: Any = MISSING, *, course: bool = False, **limits: Any) -> Any:
    """A field of a group of settings. Without a default, a value is required. limits: see `Limits`.

    course: the setting affects the course of a run. It is stored in checkpoints and compared on resume; all other
    settings may change from one start to the next.
    """
    metadata = {"help": help, "limits": Limits(**limits), "course": course}
    if is_dataclass(default) and isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def check(group: Any) -> None:
    """Raise ValueError for the first value of a group that its declaration does not allow. Lists become tuples."""
    hints = get_type_hints(type(group))
    for declared in fields(group):
        if "limits" in declared.metadata:
            value = getattr(group, declared.name)
            if isinstance(value, list):
                object.__setattr__(group, declared.name, value := tuple(value))
            _check(declared.name, value, hints[declared.name], declared.metadata["limits"])


def check_value(name: str, value: Any, hint: Any, **limits: float) -> None:
    """Raise ValueError unless `value` has the type `hint` and is within the limits; see `setting`."""
    _check(name, value, hint, Limits(**limits))  # type: ignore[arg-type]


def _check(name: str, value: Any, hint: Any, limits: Limits) -> None:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) not in options:
        raise ValueError(f"{name}=None: give a value")
    if set(options) <= {bool, type(None)} and value not in (True, False, None):
        raise ValueError(f"{name}={value!r} must be True or False")
    if isinstance(value, Mapping) and (by_name := [o for o in options if get_origin(o) is Mapping]):
        for key, entry in value.items():
            _check(f"{name}[{key!r}]", entry, get_args(by_name[0])[1], limits)
        return
    tuples = [get_args(option) for option in options if get_origin(option) is tuple]
    items = [item for each in tuples if str not in each for item in each]
    numbers = {option for option in (*options, *items) if option in (int, float)}
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    if choices and str not in options and (isinstance(value, str) or not numbers) and value is not None:
        if value not in choices:
            known = [*map(repr, choices), *(["one number per worker"] if items else [])]
            raise ValueError(f"{name}={value!r} is unknown: choose {', '.join(known[:-1])} or {known[-1]}")
        return
    if not numbers or (type(value) in (bool, types.NoneType) and type(value) in options):
        return
    if items and not isinstance(value, tuple) and not numbers.intersection(options):
        raise ValueError(f"{name}={value!r} must be a list of numbers")
    for number in value if isinstance(value, tuple) and items else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float if float in numbers else int):
            raise ValueError(f"{name}={value!r} must be {'a number' if float in numbers else 'an int'}")
        if not limits.allow(number):
            kind = "" if math.isfinite(number) else "a finite number "
            raise ValueError(f"{name}={value!r} must be {kind}{limits}".rstrip())
