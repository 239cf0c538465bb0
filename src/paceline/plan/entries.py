"""Saving and restoring what was learned about the workers, as plain numbers and lists."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

_T = TypeVar("_T", bound="Estimate")


@dataclass(frozen=True)
class Estimate:
    """A worker's smoothed time: numbers and tuples of numbers. `after(reading)` returns the next one."""

    def check(self) -> None:
        """Raise a ValueError that names an invalid value."""
        raise NotImplementedError


def check_time(name: str, value: object) -> None:
    if not (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf):
        raise ValueError(f"{name} {value!r} is not a time: it must be a finite number > 0")


def check_entries(kind: str, values: Mapping[str, Any], names: Sequence[str]) -> None:
    """A missing or unknown entry of what some `to_dict` wrote is a ValueError that names it."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{kind} is {values!r}: it must have {', '.join(names)}")
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"{kind} lacks {', '.join(missing)}: it needs {', '.join(names)}")
    if unknown := [str(key) for key in values if key not in names]:
        raise ValueError(f"{kind} has unknown {', '.join(unknown)}: it takes only {', '.join(names)}")


def to_entries(estimate: Estimate | None) -> dict[str, Any] | None:
    """Plain numbers and lists, for JSON; None stands for a worker without a reading."""
    if estimate is None:
        return None
    values = {each.name: getattr(estimate, each.name) for each in fields(estimate)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def from_entries(kind: type[_T], values: Mapping[str, Any] | None) -> _T | None:
    """What `to_entries` wrote. A missing, unknown or invalid entry is a ValueError that names it."""
    if values is None:
        return None
    check_entries(f"a {kind.__name__.lower()} time", values, [field.name for field in fields(kind)])
    made = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    made.check()
    return made
