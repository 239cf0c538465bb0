"""The gradients strategy for one worker with one micro-batch per step, which exchanges nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.plan.shares import Plan
from paceline.sync.gradients.watch import GradientWatch
from paceline.sync.numbers import NO_MESSAGE, Arriving, OneLoss, WorkerMessage
from paceline.sync.strategy import Accept, UpdateUnless


class DirectGradients:
    """Autograd's gradient is the mean: nothing is summed, copied or exchanged."""

    averages = None

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._replayed: Arriving | None = None
        self._take(parameters)

    def set_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.close()
        self._take(parameters)

    def _take(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = list(parameters.values())
        self._watch = GradientWatch(list(parameters), self._parameters)

    @property
    def hooks_per_parameter(self) -> int:
        return self._watch.hooks_per_parameter

    def begin_step(self, plan: Plan, *, total_weight: int | None = None, loss_scale: float = 1.0) -> None:
        return

    def begin_micro_batch(self, number: int, weight: int, *, is_last: bool) -> None:
        self._drop()  # the user may have called backward() between micro-batches
        self._watch.forget()
        self._weight = weight
        self._replayed = None

    def replayed(self, loss: Arriving) -> None:
        """A graph has run the whole step, from the batch to the new weights. Its gradients are not visible."""
        self._replayed = loss

    def backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
        self._watch.backward(loss, retain_graph)

    def end_micro_batch(self, loss: torch.Tensor | None) -> None:
        if self._replayed is None:
            self._watch.check()
        self._loss = loss

    def has_gradient(self) -> bool:
        if self._replayed is not None:
            return True
        for parameter in self._parameters:  # noqa: SIM110 - faster than any()
            if parameter.grad is not None:
                return True
        return False

    def send(self, message: WorkerMessage = NO_MESSAGE) -> None:
        self._message = message

    def finish(self, accept: Accept = lambda _: True, update_unless: UpdateUnless | None = None) -> OneLoss:
        if not self._weight:
            self._drop()
        return OneLoss(self._replayed or self._loss, self._weight, self._message)

    def complete(self) -> None:
        if self._replayed is None:
            self._drop()

    def synchronize(self) -> None:
        return

    def abandon(self) -> None:
        self._drop()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return

    def close(self) -> None:
        self._watch.close()

    def _drop(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
