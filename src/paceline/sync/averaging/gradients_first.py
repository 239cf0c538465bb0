"""Post-local SGD: gradients first, then averaging."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.plan.shares import Plan
from paceline.sync.buffers import Buffers
from paceline.sync.numbers import SILENCE, Numbers, WorkerMessage
from paceline.sync.strategy import Accept, GradientExchange, UpdateUnless


class GradientsFirst:
    """Uses one exchange for the first `num_steps` steps and another one afterwards."""

    def __init__(self, first: GradientExchange, then: Callable[[], GradientExchange], num_steps: int) -> None:
        self._now = first
        self._then = then
        self._steps_left = num_steps

    def begin_step(self, plan: Plan, *, total_weight: int | None = None, loss_scale: float = 1.0) -> None:
        self._now.begin_step(plan, total_weight=total_weight, loss_scale=loss_scale)

    def begin_micro_batch(self, number: int, weight: int, *, is_last: bool) -> None:
        self._now.begin_micro_batch(number, weight, is_last=is_last)

    def backward(self, run: Callable[[], None]) -> None:
        self._now.backward(run)

    def end_micro_batch(self, loss: torch.Tensor | None) -> None:
        self._now.end_micro_batch(loss)

    def has_gradient(self) -> bool:
        return self._now.has_gradient()

    @property
    def hooks_per_parameter(self) -> int:
        return self._now.hooks_per_parameter

    def set_parameters(self, parameters: Mapping[str, torch.Tensor], buffers: Buffers) -> None:
        self._now.set_parameters(parameters, buffers)

    def send(self, message: WorkerMessage = SILENCE) -> None:
        self._now.send(message)

    def finish(self, accept: Accept = lambda _: True, update_unless: UpdateUnless | None = None) -> Numbers | None:
        return self._now.finish(accept, update_unless)

    def complete(self) -> None:
        self._now.complete()
        self._steps_left -= 1
        if self._steps_left == 0:
            self._switch()

    def synchronize(self) -> None:
        self._now.synchronize()

    def abandon(self) -> None:
        self._now.abandon()

    def state_dict(self) -> dict[str, Any]:
        return {"first_steps_left": self._steps_left, **self._now.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps_left = state.get("first_steps_left", self._steps_left)
        if self._steps_left <= 0:
            self._switch()
        self._now.load_state_dict(state)

    def close(self) -> None:
        self._now.close()

    def _switch(self) -> None:
        self._now.close()
        self._now = self._then()
