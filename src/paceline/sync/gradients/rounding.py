"""Adds weighted, rounded gradients to float64 sums: one pass over a flat buffer, with no work per parameter."""

from __future__ import annotations

import logging
import math
import os
import struct
from functools import cache
from typing import Any

import numpy as np
import torch

from paceline.sync.gradients.layout import BLOCK_NUMEL, BucketLayout

logger = logging.getLogger("paceline")

SWITCH = "PACELINE_TRITON"
# Blocks per pass on a CPU: the intermediate values stay in the cache.
CPU_BLOCKS = 1024
_GPU_ROWS = 32  # blocks per program of the kernel


class RoundedAddition:
    """total += round(weight * gradient) over the flat buffers of one bucket, each block on its parameter's grid.

    After `add`, `peaks` holds each parameter's largest |weight * gradient| of that call.
    """

    def __init__(self, layout: BucketLayout) -> None:
        self._layout = layout
        self._anchors = torch.ones(len(layout), dtype=torch.float64, device=layout.device)
        self.peaks = torch.zeros(len(layout), dtype=torch.float64, device=layout.device)
        self._kernel = _kernel_on(layout.device)
        self._owners = torch.from_numpy(layout.owner_of_block.astype(np.int32)).to(layout.device)
        if layout.device.type == "cpu":
            self._anchor_of_block = torch.ones(layout.num_blocks, 1, dtype=torch.float64)
            rows = min(CPU_BLOCKS, layout.num_blocks)
            self._scratch = torch.empty(rows, BLOCK_NUMEL, dtype=torch.float64)
            self._ends_of_block = torch.zeros(2, layout.num_blocks, dtype=layout.dtype)  # its least and largest

    def set_anchors(self, anchors: np.ndarray) -> None:
        """One per parameter of the bucket."""
        self._anchors.copy_(torch.from_numpy(anchors))
        if self._layout.device.type == "cpu":
            np.take(anchors, self._layout.owner_of_block, out=self._anchor_of_block.numpy()[:, 0])

    def add(self, gradient: torch.Tensor, total: torch.Tensor, weight: float, *, first: bool) -> None:
        """`first` overwrites the total instead of adding to it."""
        if not self._layout.num_blocks:
            return
        if self._kernel is not None:
            self._add_by_kernel(gradient, total, weight, first=first)
        elif self._layout.device.type == "cpu":
            self._add_on_host(gradient.view(-1, BLOCK_NUMEL), total.view(-1, BLOCK_NUMEL), weight, first=first)
        else:
            term = gradient.view(-1, BLOCK_NUMEL).to(torch.float64).mul_(weight)
            self._gather_peaks(term.abs().amax(1))
            anchors = self._anchors[self._owners][:, None]
            term.add_(anchors).sub_(anchors)
            whole = total.view(-1, BLOCK_NUMEL)
            whole.copy_(term) if first else whole.add_(term)

    def peaks_of(self, gradient: torch.Tensor, weight: float) -> torch.Tensor:
        """The peaks of this gradient, without adding it."""
        if self._layout.num_blocks:
            self._gather_peaks(gradient.view(-1, BLOCK_NUMEL).to(torch.float64).mul_(weight).abs_().amax(1))
        return self.peaks

    def _add_on_host(self, gradient: torch.Tensor, total: torch.Tensor, weight: float, *, first: bool) -> None:
        is_one_pass = gradient.dtype != torch.float64 and _fits_29_bits(weight)
        for start in range(0, len(gradient), CPU_BLOCKS):
            rows = slice(start, start + CPU_BLOCKS)
            source, sums, anchors = gradient[rows], total[rows], self._anchor_of_block[rows]
            term = sums if first else self._scratch[: len(source)]
            term.copy_(source)
            if is_one_pass:
                # The product is exact in float64, so fused and separate rounding agree.
                torch.add(anchors, term, alpha=weight, out=term)
            else:
                term.mul_(weight).add_(anchors)
            term.sub_(anchors)
            if not first:
                sums.add_(term)
            torch.amin(source, 1, out=self._ends_of_block[0, rows])
            torch.amax(source, 1, out=self._ends_of_block[1, rows])
        peaks = self.peaks.numpy()
        self._layout.peaks(self._ends_of_block.abs().amax(0).double().numpy(), peaks)
        peaks *= abs(weight)

    def _gather_peaks(self, peak_of_block: torch.Tensor) -> None:
        peaks = np.zeros(len(self._layout))
        self._layout.peaks(peak_of_block.double().cpu().numpy(), peaks)
        self.peaks.copy_(torch.from_numpy(peaks))

    def _add_by_kernel(self, gradient: torch.Tensor, total: torch.Tensor, weight: float, *, first: bool) -> None:
        self.peaks.zero_()
        num_blocks = self._layout.num_blocks
        with torch.cuda.device(gradient.device):
            self._kernel[(-(-num_blocks // _GPU_ROWS),)](
                gradient,
                total,
                self._owners,
                self._anchors,
                self.peaks.view(torch.int64),
                num_blocks,
                _bits(weight),
                IS_FIRST=first,
                ROWS=_GPU_ROWS,
                BLOCK=BLOCK_NUMEL,
                enable_fp_fusion=False,  # fused multiply-add would round once instead of twice
            )


def _kernel_on(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    if os.environ.get(SWITCH) == "0":
        logger.info("exact sums on %s do not use the Triton kernel: %s=0", device, SWITCH)
        return None
    return _tried_kernel(device)


@cache
def _tried_kernel(device: torch.device) -> Any:
    """The kernel, after a trial run. None, if it fails: the fallback has the same result."""
    try:
        from paceline.sync.gradients.exact_kernel import add_rounded

        number = torch.zeros(BLOCK_NUMEL, device=device)
        double = number.double()
        owner = torch.zeros(1, dtype=torch.int32, device=device)
        bits = double[:1].clone().view(torch.int64)
        with torch.cuda.device(device):
            add_rounded[(1,)](
                number, double, owner, double + 1, bits, 1, _bits(1.0),
                IS_FIRST=True, ROWS=_GPU_ROWS, BLOCK=BLOCK_NUMEL, enable_fp_fusion=False,
            )  # fmt: skip
    except Exception as error:  # no package, no compiler, no support for the device, ...
        reason = str(error).partition("\n")[0] or type(error).__name__
        logger.info("exact sums on %s do not use the Triton kernel: %s", device, reason)
        return None
    return add_rounded


def _fits_29_bits(number: float) -> bool:
    return math.ldexp(math.frexp(number)[0], 29).is_integer()


def _bits(number: float) -> int:
    """The bits of a float64 as an integer: Triton passes floats to kernels as float32."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)
