"""What brings a worker its micro-batches, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from paceline.plan.shares import Plan
from paceline.plan.steps import Position

# Who takes which micro-batches of a step, where so many are left in the epoch.
PlanStep = Callable[[int], Plan]


class Step(NamedTuple):
    """A step to take. `total_weight`: what its micro-batches' weights add up to, where that is known beforehand.
    `is_cut`: it is the epoch's last, and may be smaller for that."""

    plan: Plan
    num_samples: int
    total_weight: int | None
    is_cut: bool


class Feed(Protocol):
    """`begin_step`, then `micro_batch` for each of this worker's; a step may be begun again at the same position."""

    def begin_step(self, position: Position) -> Step | None:
        """The step at this position; None if the epoch is over. All workers get the same answer."""

    def micro_batch(self, numbers: range) -> tuple[Any, int]:
        """The batch of these micro-batches of the step, on the device, and its weight in the step's mean."""

    def after_step(self, position: Position) -> Position:
        """Where the run is once the step that was begun last is done."""

    def close(self) -> None:
        """Stop reading ahead."""
