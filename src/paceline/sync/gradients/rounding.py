"""Exact sums: weighted, rounded gradients in float64. One pass over a flat buffer, with no work per parameter."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeAlias, cast

import numpy as np
import torch

from paceline.sync.gradients.layout import BLOCK_NUMEL, BucketLayout

# Blocks per chunk on a CPU: the intermediate values stay in the cache.
CPU_BLOCKS = 1024
# Micro-batches whose peaks are computed together, because small operations cost more than their computation.
NUM_PEAKS = 8

# By call and parameter. On a CPU lists: between passes over all gradients, the first call of any operation of NumPy
# takes microseconds, since its code is not in the cache. The interpreter's is.
Peaks: TypeAlias = torch.Tensor | list[list[float]]


def _scratch() -> torch.Tensor:
    return torch.empty(CPU_BLOCKS, BLOCK_NUMEL, dtype=torch.float64)


class Workspace:
    """Memory that the sums of several buckets share, if only one of them is added to at a time.

    gradients: room for the gradients of the largest of these buckets.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.gradients = torch.zeros(numel, dtype=dtype, device=device)
        self.scratch = _scratch() if device.type == "cpu" else torch.empty(0, dtype=torch.float64)


class CollectedGradients:
    """The gradients of one bucket in a flat buffer, in the parameters' dtype. Its views are the parameters'.

    workspace: shared with other buckets; without one, the buffer is the bucket's own.
    """

    def __init__(self, layout: BucketLayout, workspace: Workspace | None = None) -> None:
        self.flat = (
            torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
            if workspace is None
            else workspace.gradients[: layout.numel]
        )
        self.views = layout.views(self.flat)
        self._gaps = [] if workspace is None else layout.gaps(self.flat)

    def collect(self, gradients: list[torch.Tensor | None]) -> None:
        """Copy them. One that is missing counts as zeros."""
        if self._gaps:  # another bucket may have written there
            torch._foreach_zero_(self._gaps)
        views, found = self.views, [gradient for gradient in gradients if gradient is not None]
        if len(found) < len(gradients):
            self.flat.zero_()
            views = [view for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
        if found:
            torch._foreach_copy_(views, found)


class ExactSums:
    """sums += round(weight * gradient), each block on its parameter's grid: independent of the order of the additions.

    flat: float64 zeros, to be exchanged; its end has other numbers. workspace: shared with other sums; without one, the
    sums have their own.

    `take_peaks` returns each parameter's largest |weight * gradient| in the calls of `add` since the last `take_peaks`;
    it must be called after `peaks_capacity` of them.

    On a CPU the sums contain their blocks' anchors after every other call, until `settle`: anchors of alternating signs
    cancel, which saves a pass over all numbers.
    """

    def __init__(self, layout: BucketLayout, flat: torch.Tensor, workspace: Workspace | None = None) -> None:
        self.layout = layout
        self._flat = flat
        self._payload = flat[: layout.numel]
        # In the parameters' dtype: the gradients of a micro-batch while they are added, and finally the means.
        self._collected = CollectedGradients(layout, workspace)
        self._has_means = False
        self._gradient = self._collected.flat.view(-1, BLOCK_NUMEL)
        self._total = self._payload.view(-1, BLOCK_NUMEL)
        self._anchors = torch.ones(len(layout), dtype=torch.float64, device=layout.device)
        self._peaks = torch.zeros(len(layout), dtype=torch.float64, device=layout.device)
        self._weights: list[float] = []  # their magnitudes, of the calls whose peaks were not taken yet
        self._is_anchored = False
        self._owners = torch.from_numpy(layout.owner_of_block.astype(np.int32)).to(layout.device)
        self.peaks_capacity = NUM_PEAKS if layout.device.type == "cpu" and workspace is None else 1
        if layout.device.type == "cpu":
            ones = torch.ones(layout.num_blocks, 1, dtype=torch.float64)
            self._anchors_of_block = torch.stack([ones, -ones])
            scratch = _scratch() if workspace is None else workspace.scratch
            whole = self._gradient, self._total, *self._anchors_of_block
            chunks = zip(*(each.split(CPU_BLOCKS) for each in whole), strict=True)
            self._chunks = [(*chunk, scratch[: len(chunk[0])]) for chunk in chunks]
            self._ends = _Ends(layout, self._gradient, self.peaks_capacity)

    @property
    def flat(self) -> torch.Tensor:
        """The sums of all calls of `add`."""
        self.settle()
        return self._flat

    def set_anchors(self, anchors: np.ndarray) -> None:
        """The anchors of the grids, one per parameter of the bucket."""
        self._anchors.copy_(torch.from_numpy(anchors))
        if self.layout.device.type == "cpu":
            positive, negative = self._anchors_of_block.numpy()[:, :, 0]
            np.take(anchors, self.layout.owner_of_block, out=positive)
            np.negative(positive, out=negative)

    def add(self, gradients: list[torch.Tensor | None], weight: float, *, first: bool, last: bool = False) -> None:
        """`first` overwrites the sums instead of adding to them.

        last: they are complete after this, are not exchanged, and `means` has no divisor.
        """
        self._begin(weight, first=first)
        self._collected.collect(gradients)
        if self.layout.device.type == "cpu":
            self._add_on_host(weight, first=first)
        else:
            term = self._gradient.to(torch.float64).mul_(weight)
            self._gather_peaks(term.abs().amax(1))
            anchors = self._anchors[self._owners][:, None]
            term.add_(anchors).sub_(anchors)
            self._total.copy_(term) if first else self._total.add_(term)

    def _begin(self, weight: float, *, first: bool) -> None:
        self._has_means = False
        if first:
            self._weights.clear()
        self._weights.append(abs(weight))

    def peaks_of(self, gradients: list[torch.Tensor | None], weight: float) -> torch.Tensor:
        """The peaks of these gradients, without adding them."""
        self._collected.collect(gradients)
        self._gather_peaks(self._gradient.to(torch.float64).mul_(weight).abs_().amax(1))
        return self._peaks

    def take_peaks(self) -> Peaks:
        """By call of `add` since the last `take_peaks`, and by parameter."""
        weights, self._weights = self._weights, []
        if self.layout.device.type != "cpu":
            return self._peaks[None]
        largest = self._ends.peaks(len(weights))
        return [[weight * peak for peak in row] for weight, row in zip(weights, largest, strict=True)]

    def clear(self) -> None:
        """Set the sums to zero and forget the peaks."""
        self._has_means = False
        self._total.zero_()
        self._weights.clear()
        self._is_anchored = False

    def _add_on_host(self, weight: float, *, first: bool) -> None:
        is_one_pass = self.layout.dtype != torch.float64 and _fits_29_bits(weight)
        call = len(self._weights) - 1
        self._is_anchored = first or not self._is_anchored
        for number, (gradient, total, positive, negative, scratch) in enumerate(self._chunks):
            term = total if first else scratch
            anchors = positive if self._is_anchored else negative
            term.copy_(gradient)
            if is_one_pass:
                # The product is exact in float64, so fused and separate rounding agree.
                torch.add(anchors, term, alpha=weight, out=term)
            else:
                term.mul_(weight).add_(anchors)
            if not first:
                # Exact, with or without the anchor: |total| <= 2**top, and the anchor is 3 * 2**top.
                total.add_(term)
            self._ends.note(call, number)  # while the chunk is in the cache

    def settle(self) -> None:
        """Remove the anchors, so that the memory of `flat` has the sums of the terms."""
        if self._is_anchored:
            self._is_anchored = False
            for _, total, _, negative, _ in self._chunks:
                total.add_(negative)

    def means(self, divisor: torch.Tensor | None) -> list[torch.Tensor]:
        """The sums, divided by `divisor` if given, in the parameters' dtype."""
        if not self._has_means:
            self.settle()
            self._collected.flat.copy_(self._payload if divisor is None else self._payload / divisor)
        return self._collected.views

    def _gather_peaks(self, peak_of_block: torch.Tensor) -> None:
        self._peaks.copy_(torch.from_numpy(self.layout.peaks(peak_of_block.double().cpu().numpy())))


class _Ends:
    """The minimum and maximum of the gradient, by call and segment.

    A segment is the part of a parameter that lies in one chunk. NumPy reduces many segments in one call.
    """

    def __init__(self, layout: BucketLayout, gradient: torch.Tensor, num_calls: int) -> None:
        self._layout = layout
        firsts = np.arange(0, layout.num_blocks, CPU_BLOCKS)
        segments = np.union1d(layout.first_blocks, firsts)
        self._first_segments = np.searchsorted(segments, layout.first_blocks)
        self._are_parameters = len(segments) == len(layout)
        dtype = np.float64 if layout.dtype == torch.float64 else np.float32
        self._lowest, self._highest = np.zeros((2, num_calls, len(segments)), dtype)
        self._chunks = []
        for first, chunk in zip(firsts.tolist(), gradient.split(CPU_BLOCKS), strict=True):
            own = slice(*np.searchsorted(segments, (first, first + CPU_BLOCKS)).tolist())
            flat = chunk.view(-1)
            values = flat.numpy() if flat.itemsize >= 4 else flat  # NumPy has no bfloat16
            ends = list(zip(self._lowest[:, own], self._highest[:, own], strict=True))
            self._chunks.append((values, (segments[own] - first) * BLOCK_NUMEL, ends))

    def note(self, call: int, number: int) -> None:
        """Record the minima and maxima of a chunk's segments."""
        values, starts, ends = self._chunks[number]
        if isinstance(values, torch.Tensor):
            values = values.float().numpy()
        lowest, highest = ends[call]
        np.minimum.reduceat(values, starts, 0, None, lowest)
        np.maximum.reduceat(values, starts, 0, None, highest)

    def peaks(self, num_calls: int) -> list[list[float]]:
        """By call and parameter: the largest magnitude; NaN if there is a NaN."""
        lowest, highest = self._lowest[:num_calls], self._highest[:num_calls]
        if not self._are_parameters:
            peaks = self._layout.peaks(np.maximum(highest, -lowest), self._first_segments)
            return cast("list[list[float]]", peaks.tolist())
        # A NaN is both the minimum and the maximum of its segment.
        pairs = zip(lowest.tolist(), highest.tolist(), strict=True)
        return [[max(-low, high) for low, high in zip(*ends, strict=True)] for ends in pairs]


@lru_cache(maxsize=64)
def _fits_29_bits(number: float) -> bool:
    return math.ldexp(math.frexp(number)[0], 29).is_integer()
