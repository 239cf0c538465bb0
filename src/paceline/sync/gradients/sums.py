"""Weighted sums of gradients, one flat buffer per bucket: plain, or exact.

Gradients stay where autograd put them until `add` collects those of a bucket, in a few calls for any number of
parameters.
"""

from __future__ import annotations

import math
from itertools import repeat
from operator import is_not
from typing import cast

import numpy as np
import torch

from paceline.sync.gradients.layout import BucketLayout
from paceline.sync.gradients.rounding import RoundedAddition, Workspace

SMALL_NUMEL = 1 << 15  # NumPy is faster than torch up to this size


class PlainSums:
    """Sums in the parameters' own precision, float32 at least. `flat` is exchanged; its end, `tail`, has other numbers.

    flat: zeros, of `sum_dtype`. is_one_term: exact mode with one micro-batch per step. Turns -0.0 into 0.0, as adding
    the zeros of other workers does.
    """

    def __init__(self, layout: BucketLayout, flat: torch.Tensor, *, is_one_term: bool = False) -> None:
        self._is_one_term = is_one_term
        self.layout = layout
        self.flat = flat
        self.tail = self.flat[layout.numel :]
        self.gaps: list[torch.Tensor] = []  # between parameters, if something else may be left there
        self._payload = self.flat[: layout.numel]
        self._views = layout.views(self.flat)
        # The same memory: NumPy multiplies small arrays in a quarter of torch's time.
        is_small = layout.device.type == "cpu" and layout.numel <= SMALL_NUMEL
        self._small = self._payload.numpy() if is_small else None

    def add(self, gradients: list[torch.Tensor | None], weight: float, *, first: bool) -> None:
        """sums += weight * gradients; `first` overwrites the sums of the previous step."""
        views, present = _present(self._views, gradients, clear_missing=first)
        if not present:
            return
        if not first:
            torch._foreach_add_(views, present, alpha=weight)
            return
        torch._foreach_copy_(views, present)
        if self.gaps:
            torch._foreach_zero_(self.gaps)
        if weight == 1.0:
            return
        if self._small is None:
            self._payload.mul_(weight)
        else:
            np.multiply(self._small, weight, out=self._small)

    def are_surely_finite(self) -> bool:
        """A fast check on a CPU. False if the sum of the sums overflows, and always on a GPU."""
        return self._payload.is_cpu and math.isfinite(self._payload.sum())

    def largest(self) -> torch.Tensor:
        """The largest magnitude in the sums; NaN if there is a NaN."""
        return torch.maximum(self._payload.amax(), -self._payload.amin())  # a third of the time of aminmax

    def clear(self) -> None:
        self._payload.zero_()

    def means(self, divisor: torch.Tensor | None) -> list[torch.Tensor]:
        """The sums over all workers, divided by `divisor` if given, in the parameters' dtype."""
        if divisor is not None:
            self._payload.div_(divisor)
        if self._is_one_term:
            self._payload.add_(0.0)
        if self.layout.dtype == self.flat.dtype:
            return self._views
        return [view.to(self.layout.dtype) for view in self._views]


class ExactSums:
    """Float64 sums on grids, independent of the order of the additions and of their division among workers.

    flat: float64 zeros. workspace: shared with other sums; without one, the sums have their own.
    """

    def __init__(self, layout: BucketLayout, flat: torch.Tensor, workspace: Workspace | None = None) -> None:
        self.layout = layout
        self._flat = flat
        self.tail = flat[layout.numel :]
        self._payload = flat[: layout.numel]
        # In the parameters' dtype: the gradients of a micro-batch while they are added, and finally the means.
        self._own = (
            torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
            if workspace is None
            else workspace.gradients[: layout.numel]
        )
        self._gaps = [] if workspace is None else layout.gaps(self._own)
        self._views = layout.views(self._own)
        self._rounded = RoundedAddition(layout, self._own, self._payload, workspace)

    @property
    def flat(self) -> torch.Tensor:
        """The sums of all calls of `add`, to be exchanged."""
        self._rounded.settle()
        return self._flat

    def set_anchors(self, anchors: np.ndarray) -> None:
        """The anchors of the grids, one per parameter of the bucket."""
        self._rounded.set_anchors(anchors)

    def add(self, gradients: list[torch.Tensor | None], weight: float, *, first: bool) -> None:
        self._collect(gradients)
        self._rounded.add(weight, first=first)

    @property
    def peaks_capacity(self) -> int:
        """After this many calls of `add`, `take_peaks` must be called."""
        return self._rounded.capacity

    def take_peaks(self) -> torch.Tensor:
        """By call of `add` since the last time, and by parameter: the largest magnitude."""
        return self._rounded.take_peaks()

    def peaks_of(self, gradients: list[torch.Tensor | None], weight: float) -> torch.Tensor:
        """The peaks of these gradients, without adding them."""
        self._collect(gradients)
        return self._rounded.peaks_of_gradient(weight)

    def clear(self) -> None:
        self._rounded.clear()

    def means(self, divisor: torch.Tensor | None) -> list[torch.Tensor]:
        self._rounded.settle()
        self._own.copy_(self._payload if divisor is None else self._payload / divisor)
        return self._views

    def _collect(self, gradients: list[torch.Tensor | None]) -> None:
        if self._gaps:  # they have what another bucket left there
            torch._foreach_zero_(self._gaps)
        views, present = _present(self._views, gradients, clear_missing=True)
        if present:
            torch._foreach_copy_(views, present)


def _present(
    views: list[torch.Tensor], gradients: list[torch.Tensor | None], *, clear_missing: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients that are not None, with their views. clear_missing: zero the views of the others."""
    if all(map(is_not, gradients, repeat(None))):
        return views, cast("list[torch.Tensor]", gradients)
    pairs = list(zip(views, gradients, strict=True))
    if clear_missing:
        for view, gradient in pairs:
            if gradient is None:
                view.zero_()
    return [view for view, g in pairs if g is not None], [g for _, g in pairs if g is not None]
