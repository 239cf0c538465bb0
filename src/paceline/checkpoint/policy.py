"""What workers do between two steps, and which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Literal, NamedTuple, TypeAlias

Mode = Literal["min", "max"]
Level = Literal["none", "quick", "tensor", "full"]  # see `compare`
Best: TypeAlias = tuple[str, int] | tuple[str, int, Mode]


class Decision(IntEnum):
    """What all workers do before the next step. Of several requests the largest wins.

    CHANGE: workers join or leave the run. A worker asks for it in every step until it is done.
    """

    CONTINUE = 0
    CHANGE = 1
    SAVE = 2
    STOP = 3


class Retention(NamedTuple):
    """Which checkpoints to keep: the `last` ones, the `best` by a metric, and one every `every` steps.

    A checkpoint is kept if any rule selects it. Without rules all are kept.
    """

    last: int | None = None
    best: Best | None = None
    every: int | None = None


def steps_to_delete(saved: Mapping[int, Mapping[str, float]], just_written: int, retention: Retention) -> list[int]:
    """The steps whose checkpoints may be deleted, ascending. Never the one just written and never the newest.

    saved: the metrics of all intact checkpoints, by step. Damaged ones count for no rule and are left to the user.
    """
    last, best, every = retention
    if retention == Retention():
        return []
    steps = sorted(saved)
    kept = {just_written, *steps[-max(1, last or 0) :]}
    if best is not None:
        name, count, *mode = best
        sign = -1 if mode == ["max"] else 1
        # NaN is the worst. Of equal ones the newer is better.
        ranked = [
            (math.isnan(value), 0.0 if math.isnan(value) else sign * value, -step)
            for step in steps
            if (value := saved[step].get(name)) is not None
        ]
        kept.update(-negative_step for _, _, negative_step in sorted(ranked)[:count])
    if every is not None:
        kept.update(step for step in steps if step % every == 0)
    return [step for step in steps if step not in kept]
