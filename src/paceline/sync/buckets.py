"""Parameters' gradients as flat buffers.

A bucket is one contiguous buffer holding the weighted gradient sums of some parameters, so that they travel in one
exchange. Which parameters share a bucket depends on the model alone, never on the world.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from paceline.comm.base import Communicator, Pending
from paceline.sync.grid import Grid

# Every parameter starts on a cache line: kernels choose other paths, with other rounding, for unaligned memory.
ALIGNMENT_BYTES = 64
BUCKET_BYTES = 8 << 20
SMALL_NUMEL = 1 << 15  # up to here torch uses one thread
# Exact rounding makes five passes over the data; blocks of this many elements stay in a core's cache between them.
CPU_BLOCK = 1 << 15


class Bucket:
    """The gradient sums of some parameters. `views[i]` has the shape and strides of `parameters[i]`.

    `tail` is extra space at the end that travels along: the step's small numbers ride with the last bucket.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype, communicator: Communicator, tail_numel: int
    ) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.communicator = communicator
        device = self.parameters[0].device
        offsets, payload = _offsets(self.parameters, dtype)
        self.flat = communicator.empty(payload + tail_numel, dtype, device).zero_()
        self.payload, self.tail = self.flat[:payload], self.flat[payload:]
        self.views = [
            torch.as_strided(self.flat, p.shape, _strides(p), offset)
            for p, offset in zip(self.parameters, offsets, strict=True)
        ]
        self._are_gradients = all(p.dtype == dtype for p in self.parameters)
        # The same memory, which NumPy multiplies in a quarter of torch's time while it is small.
        self._small = self.payload.numpy() if device.type == "cpu" and payload <= SMALL_NUMEL else None

    def add(self, index: int, gradient: torch.Tensor, weight: float, *, first: bool) -> None:
        """views[index] += weight * gradient; the first addition of a step overwrites instead."""
        view = self.views[index]
        if not first:
            view.add_(gradient, alpha=weight)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, weight, out=view)
        else:
            view.copy_(gradient).mul_(weight)

    def add_all(self, gradients: list[torch.Tensor], weight: float, *, first: bool) -> None:
        """The same for all of them: three calls of torch, and the same bits."""
        if not first:
            torch._foreach_add_(self.views, gradients, alpha=weight)
            return
        torch._foreach_copy_(self.views, gradients)
        if self._small is None:
            self.payload.mul_(weight)
        else:
            np.multiply(self._small, weight, out=self._small)

    def exchange(self) -> Pending:
        """Start adding up what all workers have here."""
        return self.communicator.all_reduce(self.flat)

    def publish(self, used: Sequence[bool], divisor: torch.Tensor | None = None) -> None:
        """Give every used parameter its gradient, divided if the weights did not do that; the others keep None."""
        if divisor is not None:
            self.payload.div_(divisor)
        for parameter, gradient, is_used in zip(self.parameters, self._gradients(), used, strict=True):
            parameter.grad = gradient if is_used else None

    def _gradients(self) -> list[torch.Tensor]:
        """The sums in the parameters' own type; where that is the bucket's, without a copy."""
        if self._are_gradients:
            return self.views
        return [view.to(parameter.dtype) for parameter, view in zip(self.parameters, self.views, strict=True)]


class ExactBucket(Bucket):
    """A float64 bucket on a grid: its sums do not depend on the order of the additions."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype, communicator: Communicator, tail_numel: int
    ) -> None:
        super().__init__(parameters, torch.float64, communicator, tail_numel)
        self.grid = Grid()
        # Kept from step to step: fresh memory for every step's gradients would cost more than the conversion.
        self._rounded = torch.empty_like(self.payload, dtype=self.parameters[0].dtype)
        self._rounded_views = [
            torch.as_strided(self._rounded, view.shape, view.stride(), view.storage_offset()) for view in self.views
        ]

    def add(self, index: int, gradient: torch.Tensor, weight: float, *, first: bool) -> None:
        view = self.views[index]
        gradient = in_layout_of(view, gradient)
        add_exactly(_memory_order(view), _memory_order(gradient), weight, self.grid, first=first)

    def _gradients(self) -> list[torch.Tensor]:
        self._rounded.copy_(self.payload)
        return self._rounded_views


class OneTermBucket(Bucket):
    """For exact steps of one micro-batch: the sum is its one term, which needs no grid.

    Other workers add zeros to it, which make 0.0 of -0.0: here it becomes that in a world of one too.
    """

    def add(self, index: int, gradient: torch.Tensor, weight: float, *, first: bool) -> None:
        super().add(index, gradient, weight, first=first)
        self.views[index].add_(0.0)


def add_exactly(total: torch.Tensor, term: torch.Tensor, weight: float, grid: Grid, *, first: bool) -> None:
    """total += weight * term, rounded to the grid after weighting. All one-dimensional; `total` is float64.

    `first` overwrites the total instead.
    """
    anchor = grid.anchor
    anchored = Anchored(anchor, weight, term)
    for start, stop in _blocks(total):
        part = total[start:stop]
        rounded = part.copy_(term[start:stop]) if first else term[start:stop].to(torch.float64, copy=True)
        anchored(rounded).sub_(anchor)
        if not first:
            part.add_(rounded)


class Anchored:
    """Replaces float64 copies x of the numbers of `term` by anchor + weight * x, which rounds the product to the grid.

    In one pass on a CPU where the product fits a float64, so that it does not matter whether it is rounded by itself.
    """

    def __init__(self, anchor: float, weight: float, term: torch.Tensor) -> None:
        self._anchor = anchor
        self._weight = weight
        weight_fits_29_bits = math.ldexp(math.frexp(weight)[0], 29).is_integer()
        is_one_pass = term.is_cpu and term.dtype != torch.float64 and weight_fits_29_bits
        self._start = torch.tensor(anchor, dtype=torch.float64) if is_one_pass else None

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor:
        if self._start is None:
            return numbers.mul_(self._weight).add_(self._anchor)
        return torch.add(self._start, numbers, alpha=self._weight, out=numbers)


def in_layout_of(view: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with its elements in memory as the view has them; copied only if they are not."""
    if gradient.stride() == view.stride():
        return gradient
    return torch.empty_like(view, dtype=gradient.dtype).copy_(gradient)


def largest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """max |x|, NaN if any is. One vectorised pass, twenty times as fast on the CPU as the infinity norm."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    low, high = torch.aminmax(tensor)
    return torch.maximum(high, -low).to(torch.float64)


def largest_on_host(tensor: torch.Tensor) -> float:
    """The same as a number: sooner done where the tensor is on the host anyway."""
    if tensor.numel() == 0:
        return 0.0
    low, high = torch.aminmax(tensor)
    largest: float = high.item()
    return max(largest, -low.item())


def assign(parameters: Mapping[str, torch.Tensor], bucket_bytes: int = BUCKET_BYTES) -> list[dict[str, torch.Tensor]]:
    """Cut the parameters into buckets, last parameter first: the order in which backward finishes them."""
    groups: list[dict[str, torch.Tensor]] = []
    size, dtype = bucket_bytes, None
    for name, parameter in reversed(list(parameters.items())):
        if size >= bucket_bytes or parameter.dtype != dtype:
            groups.append({})
            size, dtype = 0, parameter.dtype
        groups[-1][name] = parameter
        size += parameter.numel() * parameter.element_size()
    return groups


def sum_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Half precision is too coarse to sum in; everything else sums in its own precision."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _offsets(parameters: list[torch.Tensor], dtype: torch.dtype) -> tuple[list[int], int]:
    align = ALIGNMENT_BYTES // dtype.itemsize
    offsets, end = [], 0
    for parameter in parameters:
        offsets.append(end)
        end += -(-parameter.numel() // align) * align
    return offsets, end


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own layout (channels_last, say), which fused optimizers expect of its gradient."""
    return torch.empty_like(parameter, device="meta").stride()


def _memory_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    size = CPU_BLOCK if tensor.device.type == "cpu" else max(1, tensor.numel())
    return ((start, start + size) for start in range(0, tensor.numel(), size))
