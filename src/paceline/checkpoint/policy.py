"""When to save, and which checkpoints to keep. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple


class Decision(IntEnum):
    """What all workers do before the next step. Of several requests the largest wins."""

    CONTINUE = 0
    SAVE = 1
    STOP = 2


class Progress(NamedTuple):
    """A point between two steps: completed steps and epochs, and the worker's clock in seconds."""

    step: int
    epoch: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """Save every N steps, minutes or epochs, whichever comes first, and at the end of the run.

    Steps and epochs are counted from the start of the run, not from the last save: a resumed run saves at the same
    steps as an uninterrupted one.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    every_epochs: int | None = None
    final: bool = True

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_epochs"):
            check_positive(name, getattr(self, name))
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise ValueError(f"every_minutes={self.every_minutes!r} must be > 0, or None")

    def is_due_by_count(self, now: Progress, last: Progress) -> bool:
        """Whether a multiple of steps or epochs was reached since the last save. Equal on all workers.

        `last` is the last save, or the start or resumption of the run.
        """
        return _passed(self.every_steps, last.step, now.step) or _passed(self.every_epochs, last.epoch, now.epoch)

    def is_due_by_clock(self, now_s: float, last: Progress) -> bool:
        """Whether the minutes have passed. Clocks differ: rank 0 decides, and the step's exchange tells the others."""
        return self.every_minutes is not None and now_s - last.seconds >= 60 * self.every_minutes

    def is_due_at_end(self, now: Progress, last: Progress) -> bool:
        """Whether a run that ends now has unsaved steps. Equal on all workers."""
        return self.final and now.step > last.step


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep: the `last` ones, the `best` by `metric`, and those of every `every` steps.

    A checkpoint is kept if any rule selects it. Without rules all are kept.
    """

    last: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    every: int | None = None

    def __post_init__(self) -> None:
        for name in ("last", "best", "every"):
            check_positive(name, getattr(self, name))
        if (self.best is None) != (self.metric is None):
            raise ValueError(f"best={self.best} and metric={self.metric!r}: give both or neither")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode={self.mode!r}: choose 'min' or 'max'")

    @property
    def keeps_all(self) -> bool:
        return self.last is None and self.best is None and self.every is None


class SavedStep(NamedTuple):
    """A checkpoint on disk. `metric` is None if it was not measured."""

    step: int
    metric: float | None = None
    is_intact: bool = True


def steps_to_delete(saved: Sequence[SavedStep], just_written: int, retention: Retention) -> list[int]:
    """The steps whose checkpoints may be deleted, ascending.

    Never the one just written and never the newest intact one. Damaged ones are left to the user and count for no
    rule.
    """
    if retention.keeps_all:
        return []
    intact = sorted(found for found in saved if found.is_intact)
    steps = [found.step for found in intact]
    kept = {just_written, *steps[-max(1, retention.last or 0) :]}
    if retention.best is not None:
        kept.update(_best(intact, retention.best, retention.mode))
    if retention.every is not None:
        kept.update(step for step in steps if step % retention.every == 0)
    return [step for step in steps if step not in kept]


def check_positive(name: str, value: int | None) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name}={value!r} is not a positive integer: choose {name} >= 1 or None")


def _passed(interval: int | None, last: int, now: int) -> bool:
    return interval is not None and now // interval > last // interval


def _best(saved: Sequence[SavedStep], count: int, mode: str) -> list[int]:
    """The steps with the best metrics. Of equal ones the newer is better; NaN is the worst."""
    sign = 1 if mode == "min" else -1
    ranked = [
        (True, 0.0, -found.step) if math.isnan(found.metric) else (False, sign * found.metric, -found.step)
        for found in saved
        if found.metric is not None
    ]
    return [-negative_step for _, _, negative_step in sorted(ranked)[:count]]
