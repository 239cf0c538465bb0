"""The record of a completed step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.timing import Timing
from paceline.plan.shares import Plan, sizes
from paceline.run.step.replica import Number
from paceline.sync.numbers import KnownNumbers, LocalNumbers, Numbers


@dataclass(slots=True)  # not frozen: that costs a microsecond per step
class StepRecord:
    """A completed step. Numbers are read from the device on demand.

    step: number of completed steps. epoch: counted from 0. num_samples: size of the global batch. lr: learning rate of
    the next step. is_skipped: fp16 overflowed.
    """

    step: int
    epoch: int
    num_samples: int
    lr: float
    is_skipped: bool
    _plan: Plan
    _numbers: Numbers
    _norm: Number | None

    def to_dict(self) -> dict[str, Any]:
        """For a worker that did not complete this step. Waits for its numbers."""
        numbers = KnownNumbers.of(self._numbers)
        plan = [(own.start, own.stop) for own in self._plan]
        own = (self.step, self.epoch, self.num_samples, self.lr, self.is_skipped, plan, self.grad_norm)
        return {"own": own, "numbers": numbers.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepRecord:
        step, epoch, num_samples, lr, is_skipped, plan, norm = values["own"]
        shares = tuple(range(*bounds) for bounds in plan)
        numbers = KnownNumbers.from_dict(values["numbers"])
        norm = None if norm is None else torch.tensor(norm, dtype=torch.float64)
        return cls(step, epoch, num_samples, lr, is_skipped, shares, numbers, norm)

    @property
    def loss(self) -> float:
        """The mean over the global batch, before the update; the same on every worker.

        NaN if no sample had weight, or after a bare `loss.backward()`. With `Averaging`: the mean over all workers'
        steps between the last two averages; NaN until the first.
        """
        return self._numbers.loss

    @property
    def weight(self) -> float:
        """The total weight of the mean: samples, or the sum of weight_fn. With `Averaging`: per step, as for `loss`."""
        return self._numbers.total_weight

    @property
    def is_exchanged(self) -> bool:
        """Whether all workers know the numbers of this step. With `Averaging` each worker knows its own."""
        return not isinstance(self._numbers, LocalNumbers)

    @property
    def part(self) -> tuple[float, float]:
        """For a sum over steps: weighted loss, and weight; of all workers, or this one's if it was not exchanged."""
        if self.is_skipped:
            return 0.0, 0.0
        if isinstance(self._numbers, LocalNumbers):
            return self._numbers.own_part
        return (self.loss * self.weight, self.weight) if self.weight else (0.0, 0.0)

    @property
    def shares(self) -> tuple[int, ...]:
        """The number of micro-batches that each worker took, by rank."""
        return sizes(self._plan)

    @property
    def timings(self) -> Sequence[Timing]:
        """The workers' timings, by rank."""
        return self._numbers.timings

    @property
    def grad_norm(self) -> float | None:
        """The mean gradient's norm before clipping; None unless `max_grad_norm` is set (math.inf only measures)."""
        return None if self._norm is None else self._norm.item()
