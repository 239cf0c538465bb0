"""Finding the loss that is no number, without making the device wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.core.errors import NonFiniteError
from paceline.sync.numbers import OneLoss, StepNumbers

Plan = Sequence[range]


class _Copy(NamedTuple):
    step: int
    plan: Plan
    losses: torch.Tensor
    arrived: torch.cuda.Event


class FiniteWatch:
    """Raises `NonFiniteError` for a step whose loss is inf or NaN.

    On the CPU before the optimizer's step. On a GPU the losses are copied behind the computation and looked at when
    they have arrived, a step or so later; `flush` waits for the rest.
    """

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def check(self, step: int, plan: Plan, numbers: StepNumbers | OneLoss) -> None:
        if numbers.on_device is None:
            _raise_if_not_finite(step, plan, numbers.losses)
            return
        count = plan[-1].stop
        losses = numbers.on_device.reshape(-1)[:count]
        pinned = torch.empty(count, dtype=losses.dtype, pin_memory=True)
        pinned.copy_(losses, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copies.append(_Copy(step, plan, pinned, event))
        while self._copies and self._copies[0].arrived.query():
            self._look_at_oldest()

    def flush(self) -> None:
        while self._copies:
            self._copies[0].arrived.synchronize()
            self._look_at_oldest()

    def _look_at_oldest(self) -> None:
        copy = self._copies.pop(0)
        _raise_if_not_finite(copy.step, copy.plan, copy.losses.tolist())


def _raise_if_not_finite(step: int, plan: Plan, losses: list[float]) -> None:
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            rank = next(rank for rank, numbers in enumerate(plan) if number in numbers)
            raise NonFiniteError(
                f"loss is {loss} at step {step}, micro-batch {number}, rank {rank}: look at that micro-batch's data, "
                "lower the learning rate or clip gradients",
                step=step,
                micro_batch=number,
                rank=rank,
            )
