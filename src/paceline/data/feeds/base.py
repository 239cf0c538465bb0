"""The interface between a worker's step and its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from paceline.plan.epoch import Position
from paceline.plan.shares import Plan

FeedKind: TypeAlias = Literal["sharded", "dispatched"]

# Makes the plan of a step from the number of micro-batches that are left in the epoch.
PlanStep: TypeAlias = Callable[[int], Plan]


@dataclass(frozen=True)
class DataSettings:
    """How the data is read; see `Trainer.setup`."""

    seed: int
    shuffle: bool
    feed: FeedKind = "sharded"
    readers: int = 0
    prefetch: int | None = None
    num_shards: int | None = None
    shuffle_buffer: int = 0
    weight_fn: Callable[[Any], int] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    at_once: int = 1
    resident: bool = False


class Step(NamedTuple):
    """One step. `total_weight`: the sum of its micro-batches' weights, or None if it is not known in advance.
    `is_cut`: it is the last step of its epoch and may be smaller than the others. `after`: the position after it."""

    plan: Plan
    num_samples: int
    total_weight: int | None
    is_cut: bool
    after: Position


class Feed(Protocol):
    """Call `begin_step`, then `micro_batch` for each of this worker's; a step may be repeated at its position."""

    def begin_step(self, position: Position) -> Step | None:
        """The step at this position, or None at the end of the epoch. The result is the same on all workers."""

    def micro_batch(self, numbers: range) -> tuple[Any, int]:
        """The batch of these micro-batches of the step, on the device, and its weight in the step's mean."""

    def reconnect(self) -> None:
        """The communicator has other workers now: all of them call this together, and begin a step next."""

    def close(self) -> None:
        """Stop reading ahead and release readers."""
