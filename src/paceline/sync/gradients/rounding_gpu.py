"""Exact sums on a GPU by one kernel per bucket, which reads the gradients where autograd left them."""

from __future__ import annotations

import logging
import os
import struct
from collections import OrderedDict
from functools import cache
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import numpy as np
import torch

from paceline.sync.gradients.layout import BLOCK_NUMEL, BucketLayout, memory_order
from paceline.sync.gradients.rounding import NUM_PEAKS, ExactSums, Peaks, Workspace

logger = logging.getLogger("paceline")

SWITCH = "PACELINE_TRITON"
ALIGNMENT_BYTES = 16  # at least what the kernels load at a time
CHUNK_NUMEL = 4096  # of a program of the kernels
# Allocators give a step's gradients the same few addresses again and again.
_MAX_TABLES = 64
_dtype = attrgetter("dtype")


def exact_sums(layout: BucketLayout, flat: torch.Tensor, workspace: Workspace | None = None) -> ExactSums:
    """With the kernel if it can be used; the result is the same."""
    kernels = kernels_on(layout.device)
    if kernels is None:
        return ExactSums(layout, flat, workspace)
    return KernelSums(layout, flat, kernels, workspace)


class GradientTables:
    """The kernels' tables of a bucket's parameters and of the addresses of their gradients."""

    def __init__(self, layout: BucketLayout) -> None:
        self._device = layout.device
        self._likes = layout.views(torch.empty(layout.numel, dtype=layout.dtype, device="meta"))
        numels = np.array([p.numel() for p in layout.parameters])
        num_chunks = np.maximum(-(-numels // CHUNK_NUMEL), 1)  # of an empty parameter one chunk without elements
        self.num_chunks = int(num_chunks.sum())
        first_chunks = (num_chunks.cumsum() - num_chunks).astype(np.int32)
        owner_of_chunk = np.repeat(np.arange(len(layout), dtype=np.int32), num_chunks)
        self.numels, self.first_chunks, self.owner_of_chunk, self.offsets = (
            torch.from_numpy(table).to(layout.device)
            for table in (numels, first_chunks, owner_of_chunk, np.array(layout.offsets))
        )
        self._tables: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()

    def addresses_of(self, gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
        """One per parameter, on the device; 0 for a missing gradient. None if the kernels cannot read them."""
        if not self._has_layout(gradients):
            return None
        addresses = tuple([0 if gradient is None else gradient.data_ptr() for gradient in gradients])
        table = self._tables.get(addresses)
        if table is None:
            if any(address % ALIGNMENT_BYTES for address in addresses):
                return None
            # From pinned memory: the host does not wait for the device.
            table = torch.tensor(addresses, pin_memory=True).to(self._device, non_blocking=True)
            self._tables[addresses] = table
            if len(self._tables) > _MAX_TABLES:
                self._tables.popitem(last=False)
        return table

    def _has_layout(self, gradients: list[torch.Tensor | None]) -> bool:
        """Whether all have the dtype and memory layout of their parameter. Gradients that the user assigned may not."""
        likes = self._likes
        if not all(map(is_not, gradients, repeat(None))):
            likes = [like for like, gradient in zip(likes, gradients, strict=True) if gradient is not None]
        found = [gradient for gradient in gradients if gradient is not None]
        if any(map(is_not, map(_dtype, found), map(_dtype, likes))):
            return False
        if list(map(torch.Tensor.stride, found)) == list(map(torch.Tensor.stride, likes)):
            return True
        return all(memory_order(g) == memory_order(like) for g, like in zip(found, likes, strict=True))


class KernelSums(ExactSums):
    """`ExactSums` by a kernel. Gradients that it cannot read in place are collected first."""

    def __init__(
        self, layout: BucketLayout, flat: torch.Tensor, kernels: Any, workspace: Workspace | None = None
    ) -> None:
        super().__init__(layout, flat, workspace)
        self._kernel = kernels.add_rounded
        self._tables = GradientTables(layout)
        self.peaks_capacity = NUM_PEAKS if workspace is None else 1
        self._peaks_of_calls = torch.zeros(self.peaks_capacity, len(layout), dtype=torch.float64, device=layout.device)

    def add(self, gradients: list[torch.Tensor | None], weight: float, *, first: bool, last: bool = False) -> None:
        self._begin(weight, first=first)
        if len(self._weights) == 1:
            self._peaks_of_calls.zero_()
        addresses = self._tables.addresses_of(gradients)
        if addresses is None:
            self._collected.collect(gradients)
            addresses = self._tables.addresses_of([*self._collected.views])
            assert addresses is not None
        tables = self._tables
        with torch.cuda.device(self.layout.device):
            self._kernel[(tables.num_chunks,)](
                addresses, tables.numels, tables.first_chunks, tables.owner_of_chunk, tables.offsets, self._anchors,
                self._peaks_of_calls[len(self._weights) - 1].view(torch.int64), self._total, self._gradient,
                _bits(weight), IS_FIRST=first, IS_LAST=last, CHUNK=CHUNK_NUMEL, BLOCK=BLOCK_NUMEL,
                enable_fp_fusion=False,  # fused multiply-add would round once instead of twice
            )  # fmt: skip
        self._has_means = last

    def take_peaks(self) -> Peaks:
        weights, self._weights = self._weights, []
        return self._peaks_of_calls[: len(weights)]


class InPlaceTerms:
    """The gradients of a step with a single micro-batch, left in place: they are their own sum."""

    def __init__(self, layout: BucketLayout, kernels: Any) -> None:
        self._layout = layout
        self._kernel = kernels.clear_signs_of_zeros
        self._tables = GradientTables(layout)
        self._peaks = torch.zeros(len(layout), dtype=torch.float64, device=layout.device)
        self._like = torch.empty(1, dtype=layout.dtype, device=layout.device)

    def take(self, gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
        """Turn -0.0 into 0.0. Returns the largest magnitude, NaN if there is a NaN; None if this is not possible."""
        addresses = self._tables.addresses_of(gradients)
        if addresses is None:
            return None
        self._peaks.zero_()
        tables = self._tables
        with torch.cuda.device(self._layout.device):
            self._kernel[(tables.num_chunks,)](
                addresses, tables.numels, tables.first_chunks, tables.owner_of_chunk, self._peaks.view(torch.int64),
                self._like, CHUNK=CHUNK_NUMEL,
            )  # fmt: skip
        return self._peaks.amax()


def kernels_on(device: torch.device) -> Any:
    """The module of the kernels. None if they cannot be used on the device: torch's operations have the same result."""
    if device.type != "cuda":
        return None
    if os.environ.get(SWITCH) == "0":
        logger.info("exact sums on %s do not use the Triton kernels: %s=0", device, SWITCH)
        return None
    return _tried_kernels(device)


@cache
def _tried_kernels(device: torch.device) -> Any:
    try:
        from paceline.sync.gradients import exact_kernel

        layout = BucketLayout({"": torch.zeros(BLOCK_NUMEL, device=device)}, 0)
        total = torch.zeros(BLOCK_NUMEL, dtype=torch.float64, device=device)
        KernelSums(layout, total, exact_kernel).add([*layout.parameters], 1.0, first=True)
    except Exception as error:  # no package, no compiler, no support for the device, ...
        reason = str(error).partition("\n")[0] or type(error).__name__
        logger.info("exact sums on %s do not use the Triton kernels: %s", device, reason)
        return None
    return exact_kernel


def _bits(number: float) -> int:
    """The bits of a float64 as an integer: Triton passes floats to kernels as float32."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)
