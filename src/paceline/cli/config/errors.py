"""Where a value comes from, and the error for a project file that cannot be used."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeAlias

_MAX_SHOWN = 10
# Up to _FEW choices are listed beside the nearest one; longer lists end after _MANY.
_FEW, _MANY = 12, 50


@dataclass(frozen=True)
class Origin:
    """The place of a value: a file with line and column, counted from 1, or "command line", or "default".

    alias: the dotted key the value was given under, if that is not the setting's own key.
    variable, variable_origin: the variable that the text at this place refers to, and where its value is set.
    """

    source: str
    line: int = 0
    column: int = 0
    alias: str = ""
    variable: str = ""
    variable_origin: Origin | None = None

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


COMMAND_LINE = Origin("command line")
DEFAULT = Origin("default")

Problem: TypeAlias = tuple[Origin, str]


class ConfigError(ValueError):
    """A project file that cannot be used. problems: all of them, in file order; the text shows the first ten."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(problems, key=lambda p: (p[0].source, p[0].line, p[0].column))
        super().__init__(self.problems)

    def __str__(self) -> str:
        lines = [f"{origin}: {message}" for origin, message in self.problems]
        if len(lines) == 1:
            return lines[0]
        left = len(lines) - _MAX_SHOWN
        more = [f"and {left} more"] if left > 0 else []
        return "\n  ".join([f"{len(lines)} problems:", *lines[:_MAX_SHOWN], *more])


def fail(origin: Origin, message: str) -> ConfigError:
    """The error for a single problem."""
    return ConfigError([(origin, message)])


def nearest(name: str, choices: Collection[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, and all of them if they are few."""
    near = get_close_matches(name, choices, n=1)
    listed = [*list(choices)[:_MANY], *(["..."] if len(choices) > _MANY else [])]
    known = f"choose from {', '.join(listed)}" if choices else "there are none"
    if not near:
        return known
    return f"did you mean {near[0]}?" + (f" ({known})" if len(choices) <= _FEW else "")
