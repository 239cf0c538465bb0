"""What follows the exchange, on every worker alike: the gradients are clipped and the optimizers take their step."""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.run.step.replica import Replica


class Number(Protocol):
    """A tensor with one number, or one that is on its way to the host."""

    def item(self) -> float: ...


class Update:
    """`clip`, and unless the step is skipped `step`. `max_norm`: None not to clip, infinite only to measure."""

    def __init__(self, replica: Replica, max_norm: float | None) -> None:
        self._replica = replica
        self._max_norm = max_norm

    def clip(self) -> Number | None:
        """The norm that the mean gradient had."""
        return self._clip()

    def _clip(self) -> torch.Tensor | None:
        if self._max_norm is None:
            return None
        parameters = [p for p in self._replica.parameters.values() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)

    def step(self) -> None:
        self._replica.step_optimizers()
