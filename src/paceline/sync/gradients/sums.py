"""Weighted sums of gradients, bucket by bucket: plain, or exact.

A micro-batch's gradients lie wherever autograd has put them. `add` takes a bucket's together, in a few calls of torch
however many parameters there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from paceline.comm.base import Communicator
from paceline.sync.gradients.layout import BucketLayout, sum_dtype
from paceline.sync.gradients.rounding import RoundedAddition

SMALL_NUMEL = 1 << 15  # up to here torch uses one thread


class Sums(Protocol):
    """One bucket's sums. `flat` is what travels; its end, `tail`, is free for other numbers."""

    layout: BucketLayout
    flat: torch.Tensor
    tail: torch.Tensor

    def add(self, gradients: Sequence[torch.Tensor | None], weight: float, *, first: bool) -> None:
        """sums += weight * gradients, where there are any; `first` overwrites what an earlier step left."""

    def clear(self) -> None:
        """No micro-batch has added anything."""

    def means(self, divisor: torch.Tensor | None) -> list[torch.Tensor]:
        """The sums over all workers, divided if the weights did not do that, in the parameters' own type."""


class PlainSums:
    """Sums in the parameters' own precision, float32 at least.

    `is_one_term`: in exact mode, where steps have one micro-batch. Its sum has no -0.0, which in a larger world the
    zeros of other workers would make 0.0.
    """

    def __init__(
        self, layout: BucketLayout, communicator: Communicator, tail_numel: int, *, is_one_term: bool = False
    ) -> None:
        self._is_one_term = is_one_term
        self.layout = layout
        self.flat = communicator.empty(layout.numel + tail_numel, sum_dtype(layout.parameters), layout.device).zero_()
        self.tail = self.flat[layout.numel :]
        self._payload = self.flat[: layout.numel]
        self._views = layout.views(self.flat)
        # The same memory, which NumPy multiplies in a quarter of torch's time while it is small.
        is_small = layout.device.type == "cpu" and layout.numel <= SMALL_NUMEL
        self._small = self._payload.numpy() if is_small else None

    def add(self, gradients: Sequence[torch.Tensor | None], weight: float, *, first: bool) -> None:
        views, present = _present(self._views, gradients, clear_missing=first)
        if not present:
            return
        if not first:
            torch._foreach_add_(views, present, alpha=weight)
            return
        torch._foreach_copy_(views, present)
        if weight == 1.0:
            return
        if self._small is None:
            self._payload.mul_(weight)
        else:
            np.multiply(self._small, weight, out=self._small)

    def largest(self) -> torch.Tensor:
        """The largest magnitude in the sums; NaN if any is."""
        return torch.maximum(self._payload.amax(), -self._payload.amin())  # a third of the time of aminmax

    def clear(self) -> None:
        self._payload.zero_()

    def means(self, divisor: torch.Tensor | None) -> list[torch.Tensor]:
        if divisor is not None:
            self._payload.div_(divisor)
        if self._is_one_term:
            self._payload.add_(0.0)
        if self.layout.dtype == self.flat.dtype:
            return self._views
        return [view.to(self.layout.dtype) for view in self._views]


class ExactSums:
    """Float64 sums on grids: they depend neither on the order of the additions nor on who made them."""

    def __init__(self, layout: BucketLayout, communicator: Communicator, tail_numel: int) -> None:
        self.layout = layout
        self.flat = communicator.empty(layout.numel + tail_numel, torch.float64, layout.device).zero_()
        self.tail = self.flat[layout.numel :]
        self._payload = self.flat[: layout.numel]
        # In the parameters' own type: a micro-batch's gradients while they are added, at the end the means.
        self._own = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
        self._views = layout.views(self._own)
        self._rounded = RoundedAddition(layout)

    def set_anchors(self, anchors: np.ndarray) -> None:
        """The grids' anchors, by parameter of the bucket."""
        self._rounded.set_anchors(anchors)

    @property
    def peaks(self) -> torch.Tensor:
        """By parameter: the largest magnitude that the last `add` has added."""
        return self._rounded.peaks

    def add(self, gradients: Sequence[torch.Tensor | None], weight: float, *, first: bool) -> None:
        self._collect(gradients)
        self._rounded.add(self._own, self._payload, weight, first=first)

    def peaks_of(self, gradients: Sequence[torch.Tensor | None], weight: float) -> torch.Tensor:
        """The peaks that `add` would find."""
        self._collect(gradients)
        return self._rounded.peaks_of(self._own, weight)

    def clear(self) -> None:
        self._payload.zero_()

    def means(self, divisor: torch.Tensor | None) -> list[torch.Tensor]:
        self._own.copy_(self._payload if divisor is None else self._payload / divisor)
        return self._views

    def _collect(self, gradients: Sequence[torch.Tensor | None]) -> None:
        views, present = _present(self._views, gradients, clear_missing=True)
        if present:
            torch._foreach_copy_(views, present)


def _present(
    views: list[torch.Tensor], gradients: Sequence[torch.Tensor | None], *, clear_missing: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients that exist, with their places. The places of the others are cleared on request."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) == len(views):
        return views, present
    if clear_missing:
        for view, gradient in zip(views, gradients, strict=True):
            if gradient is None:
                view.zero_()
    return [view for view, gradient in zip(views, gradients, strict=True) if gradient is not None], present
