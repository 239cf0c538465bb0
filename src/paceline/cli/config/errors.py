"""Where a value came from, and what is said when it cannot be used."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

_MAX_SHOWN = 10
# Of many choices the nearest is enough; a list of very many helps nobody.
_FEW, _MANY = 12, 50


@dataclass(frozen=True)
class Origin:
    """Where a value stands: a file's line and column, counted from 1, or "command line", or "default".

    `alias` is the dotted key it was given under, where that is not the setting's own. `variable`: what stands there
    refers to this variable, whose value stands at `variable_origin`.
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


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, at one place."""

    origin: Origin
    message: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.message}"


class ConfigError(ValueError):
    """A project file that cannot be used. `problems` are all that were found; the text shows the first ten."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems[:_MAX_SHOWN]]
        if len(lines) == 1:
            return lines[0]
        left = len(self.problems) - len(lines)
        return "\n  ".join([f"{len(self.problems)} problems:", *lines, *([f"and {left} more"] if left else [])])


def fail(origin: Origin, message: str) -> ConfigError:
    """The error for a single problem."""
    return ConfigError([Problem(origin, message)])


def in_order(problems: Sequence[Problem]) -> list[Problem]:
    """As they stand in their files."""
    return sorted(problems, key=lambda problem: (problem.origin.source, problem.origin.line, problem.origin.column))


def nearest(name: str, choices: Collection[str]) -> str:
    """How a message about an unknown name ends: with the nearest known one, and with all of them if they are few."""
    near = get_close_matches(name, choices, n=1)
    listed = [*list(choices)[:_MANY], *(["..."] if len(choices) > _MANY else [])]
    known = f"choose from {', '.join(listed)}" if choices else "there are none"
    if not near:
        return known
    return f"did you mean {near[0]}?" + (f" ({known})" if len(choices) <= _FEW else "")
