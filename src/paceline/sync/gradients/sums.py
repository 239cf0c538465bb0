"""Weighted sums of gradients, one flat buffer per bucket. Exact ones are in rounding.py.

Gradients stay where autograd put them until `add` collects those of a bucket, in a few calls for any number of
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from paceline.sync.gradients.layout import BucketLayout
from paceline.sync.gradients.rounding_gpu import InPlaceTerms, kernels_on

SMALL_NUMEL = 1 << 15  # NumPy is faster than torch up to this size


class PlainSums:
    """Sums in the parameters' own precision, float32 at least.

    flat: zeros, of `sum_dtype`, to be exchanged; its end has other numbers.
    """

    def __init__(self, layout: BucketLayout, flat: torch.Tensor) -> None:
        self.layout = layout
        self.flat = flat
        self._payload = self.flat[: layout.numel]
        self._views = layout.views(self.flat)
        # The same memory: NumPy multiplies small arrays in a quarter of torch's time.
        is_small = layout.device.type == "cpu" and layout.numel <= SMALL_NUMEL
        self._small = self._payload.numpy() if is_small else None

    def add(self, gradients: list[torch.Tensor | None], weight: float, *, first: bool) -> None:
        """sums += weight * gradients; `first` overwrites the sums of the previous step."""
        views, found = self._views, [gradient for gradient in gradients if gradient is not None]
        if len(found) < len(gradients):
            views = [view for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
            if first:
                self._payload.zero_()
        if not found:
            return
        if not first:
            torch._foreach_add_(views, found, alpha=weight)
            return
        torch._foreach_copy_(views, found)
        if weight == 1.0:
            return
        if self._small is None:
            self._payload.mul_(weight)
        else:
            np.multiply(self._small, weight, out=self._small)

    def settle(self) -> None:
        """Let `flat` be the sums, for those who read its memory by other means."""

    def clear(self) -> None:
        self._payload.zero_()

    def means(self, divisor: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """The sums over all workers, divided by `divisor` if given, in the parameters' dtype."""
        if divisor is not None:
            self._payload.div_(divisor)
        if self.layout.dtype == self.flat.dtype:
            return self._views
        return [view.to(self.layout.dtype) for view in self._views]


class OneTermSums(PlainSums):
    """The sums of exact mode with one micro-batch per step, which need no rounding: all but one worker add zeros.

    -0.0 becomes 0.0, as by adding the zeros of other workers. in_place: the sums are not exchanged, so gradients may
    stay where they are.
    """

    def __init__(self, layout: BucketLayout, flat: torch.Tensor, *, in_place: bool = False) -> None:
        super().__init__(layout, flat)
        kernels = kernels_on(layout.device) if in_place else None
        self._in_place = None if kernels is None else InPlaceTerms(layout, kernels)
        self._taken: list[torch.Tensor | None] | None = None  # the gradients that were left in place
        self._largest: torch.Tensor | None = None

    def add(self, gradients: list[torch.Tensor | None], weight: float, *, first: bool) -> None:
        self._taken = None
        if self._in_place is not None and weight == 1.0:
            self._largest = self._in_place.take(gradients)
            if self._largest is not None:
                self._taken = gradients
                return
        self._add_to_zeros(gradients, weight)

    def _add_to_zeros(self, gradients: list[torch.Tensor | None], weight: float) -> None:
        self._payload.zero_()
        super().add(gradients, weight, first=False)

    def are_known_finite(self) -> bool:
        """A fast check on a CPU. False if the sum of the sums overflows, and always on a GPU."""
        return self._payload.is_cpu and math.isfinite(self._payload.sum())

    def largest(self) -> torch.Tensor:
        """The largest magnitude in the sums; NaN if there is a NaN."""
        if self._taken is not None and self._largest is not None:
            return self._largest
        return torch.maximum(self._payload.amax(), -self._payload.amin())  # a third of the time of aminmax

    def clear(self) -> None:
        super().clear()
        self._taken = None

    def means(self, divisor: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        if self._taken is not None:
            if divisor is None:
                return self._taken
            self._add_to_zeros(self._taken, 1.0)
        return super().means(divisor)
