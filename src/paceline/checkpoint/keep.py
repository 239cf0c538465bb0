"""Which checkpoints stay. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Saved:
    """A checkpoint as far as keeping is concerned. `metric` is None where it was not measured."""

    step: int
    metric: float | None = None
    is_intact: bool = True


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the `last` ones, the `best` by `metric`, and for ever those of every `every` steps.

    A checkpoint stays if one of the rules claims it; without any rule all stay.
    """

    last: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    every: int | None = None

    def __post_init__(self) -> None:
        for name in ("last", "best", "every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r} is not a positive integer: choose {name} >= 1 or None")
        if (self.best is None) != (self.metric is None):
            raise ValueError(f"best={self.best} and metric={self.metric!r}: give both or none")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode={self.mode!r}: choose 'min' or 'max'")

    @property
    def keeps_all(self) -> bool:
        return self.last is None and self.best is None and self.every is None


def to_delete(saved: Sequence[Saved], just_written: int, keep: Keep) -> list[int]:
    """The steps whose checkpoints may go, rising.

    Never the one just written, never the newest intact one, and never a damaged one: that is for the user to look at,
    and counts for no rule.
    """
    if keep.keeps_all:
        return []
    intact = sorted((checkpoint for checkpoint in saved if checkpoint.is_intact), key=lambda found: found.step)
    steps = [checkpoint.step for checkpoint in intact]
    claimed = {just_written, *steps[-max(1, keep.last or 0) :]}
    if keep.best is not None:
        claimed.update(_best(intact, keep.best, keep.mode))
    if keep.every is not None:
        claimed.update(step for step in steps if step % keep.every == 0)
    return [step for step in steps if step not in claimed]


def _best(saved: Sequence[Saved], count: int, mode: str) -> list[int]:
    """The steps with the best metrics; among equals the newer, and NaN is the worst."""
    sign = 1 if mode == "min" else -1
    worst_last = [
        (True, 0.0, -found.step) if math.isnan(found.metric) else (False, sign * found.metric, -found.step)
        for found in saved
        if found.metric is not None
    ]
    return [-negative_step for _, _, negative_step in sorted(worst_last)[:count]]
