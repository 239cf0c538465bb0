"""Micro-batches whose gradients autograd adds up by itself.

A parameter's `grad` that exists already is what autograd adds to. So during backward it is the parameter's place in its
bucket, and nobody needs a hook per parameter to move the gradient there: a hundredth of a micro-batch's time on the
CPU. A gradient that comes with another weight than those before, the first one of a step, and the last one, after which
buckets leave, are moved by hooks.

The result is the same to the bit, but for the rounding of a small model's micro-batch with several losses.

PACELINE_AUTOGRAD_SUMS=0 turns it off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from paceline.sync.buckets import Bucket

logger = logging.getLogger("paceline")

SWITCH = "PACELINE_AUTOGRAD_SUMS"
# With fewer in a step, a worker gains less than the sums' one multiplication at the step's end takes.
LEAST_MICRO_BATCHES = 4


class Slot(Protocol):
    """A parameter, the place of its sum, and whether a gradient has come there in this step."""

    parameter: torch.Tensor
    view: torch.Tensor
    is_used: bool


def obstacle(buckets: Sequence[Bucket], *, exact: bool) -> str | None:
    """Why autograd cannot add to these buckets; None if it can."""
    if exact:
        return "exact mode rounds each of them"
    for bucket in buckets:
        dtype = bucket.parameters[0].dtype
        if bucket.flat.device.type != "cpu":
            return "on a GPU the host has the time to move them"
        if dtype != bucket.flat.dtype:
            return f"{dtype} is too coarse to add up in"
    return None


class AutogradSums:
    """Lends the parameters their places in the buckets while backward runs, where and when that is possible.

    For that, many gradients of one weight are added up as they are, and weighted together before they leave. So they
    are with the switch off, too: it must not change a bit.
    """

    def __init__(
        self, slots: Sequence[Slot], buckets: Sequence[Bucket], *, exact: bool, max_micro_batches: int
    ) -> None:
        self._slots = slots
        self._sums = [bucket.flat for bucket in buckets]
        reason = obstacle(buckets, exact=exact)
        self._are_weighted_last = reason is None
        self._is_off = os.environ.get(SWITCH) == "0"
        if max_micro_batches >= LEAST_MICRO_BATCHES and (self._is_off or reason is not None):
            logger.info("autograd does not add up gradients by itself: %s", reason or f"{SWITCH}=0")
        self._are_many = False
        self._unit: float | None = 1.0  # what the sums are to be multiplied by; None: not known yet
        self.is_possible = False  # in the open micro-batch
        self.have_grown = False

    def begin_step(self, num_micro_batches: int) -> None:
        """A step begins in which this worker has so many."""
        self._are_many = self._are_weighted_last and num_micro_batches >= LEAST_MICRO_BATCHES
        self._unit = None if self._are_many else 1.0

    def begin_micro_batch(self, weight: float, *, by_hooks: bool) -> float:
        """The weight with which this micro-batch's gradients are to be added. `by_hooks`: somebody waits for them."""
        self.have_grown = False
        if self._unit is None:
            self.is_possible = False
            self._unit = weight or None  # of one without weight nothing is added
            return 1.0 if weight else 0.0
        relative = weight / self._unit
        self.is_possible = self._are_many and relative == 1.0 and not by_hooks and not self._is_off
        return relative

    def backward(self, run: Callable[[torch.Tensor], None], loss: torch.Tensor) -> None:
        """`run(loss)` while autograd adds to the sums.

        A parameter without a sum yet, or with a gradient of the user's own making, or with a hook that would see the
        sum instead of the gradient, ends with its gradient where it always is.
        """
        lent = [slot for slot in self._slots if slot.is_used and slot.parameter.grad is None and not _is_watched(slot)]
        before = self._versions()
        for slot in lent:
            slot.parameter.grad = slot.view
        try:
            run(loss)
        finally:
            for slot in lent:
                slot.parameter.grad = None
        self.have_grown = self.have_grown or self._versions() != before

    def weigh(self, bucket: Bucket) -> None:
        """All micro-batches are in it, and it is about to leave."""
        if self._unit is not None and self._unit != 1.0:
            bucket.payload.mul_(self._unit)

    def _versions(self) -> list[int]:
        """Torch counts the changes of a tensor and its views."""
        return [total._version for total in self._sums]


def _is_watched(slot: Slot) -> bool:
    return bool(slot.parameter._post_accumulate_grad_hooks)
