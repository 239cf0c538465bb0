"""Many gradients added to their sums by one kernel on a GPU: what the buckets do one by one, bit for bit.

torch needs a dozen kernels for one gradient in exact mode, and a model has hundreds: launching them takes longer than
running them. Here gradients wait until some have come together, and one kernel weights, rounds and adds them all and
notes their largest magnitudes, touching every element once.

The kernel is written in Triton, which torch's CUDA builds bring along. PACELINE_FUSED=0 turns it off.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

logger = logging.getLogger("paceline")

SWITCH = "PACELINE_FUSED"
# Gradients that wait take memory: as much as an activation or two. More would not make the kernel any faster.
WAITING_BYTES = 64 << 20

_CHUNK, _BLOCK = 8192, 1024  # elements that a program of the kernel works on, all in all and at a time
_KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Arrival(NamedTuple):
    """A gradient to be added to `total`, whose layout it has, or to overwrite it if it is `first`.

    `anchor` is that of the grid, None where sums are not rounded; `peaks` has a place for every micro-batch.
    """

    gradient: torch.Tensor
    total: torch.Tensor
    peaks: torch.Tensor
    anchor: float | None
    first: bool


class FusedAddition:
    """The kernel on one device. Raises what Triton raises where it cannot build it."""

    def __init__(self, device: torch.device) -> None:
        import triton.language as tl  # type: ignore[import-not-found]

        from paceline.sync.fused_kernels import add_gradients

        self._device = device
        self._kernel = add_gradients
        self._bits = {torch.float32: tl.int32, torch.float64: tl.int64}
        self._types = dict(zip(_KINDS, (tl.float16, tl.bfloat16, tl.float32, tl.float64), strict=True))
        number = torch.zeros(1, device=device)
        self.add([Arrival(number, number.double(), number.double(), 1.0, True)], 1.0, 0)

    def takes(self, gradient: torch.Tensor) -> bool:
        return gradient.dtype in self._types and gradient.device == self._device

    def add(self, arrivals: Iterable[Arrival], weight: float, number: int) -> None:
        """total += weight * gradient for all of them, and peaks[number] = max(peaks[number], |gradient|)."""
        weight_bits = _bits(weight)
        tables: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
        for gradient, total, peaks, anchor, first in arrivals:
            key = (gradient.dtype, total.dtype, peaks.dtype, anchor is not None)
            tables.setdefault(key, []).append(
                (
                    gradient.data_ptr(),
                    total.data_ptr(),
                    peaks.data_ptr() + number * peaks.element_size(),
                    gradient.numel(),
                    0,
                    weight_bits,
                    _bits(anchor or 0.0),
                    first,
                )
            )
        for key, rows in tables.items():
            self._launch(np.array(rows, np.int64), *key)

    def _launch(
        self,
        rows: np.ndarray[Any, np.dtype[np.int64]],
        gradient: torch.dtype,
        total: torch.dtype,
        peaks: torch.dtype,
        is_rounded: bool,
    ) -> None:
        num_programs = -(-rows[:, 3] // _CHUNK)
        ends = np.cumsum(num_programs)
        rows[:, 4] = ends - num_programs
        if not ends[-1]:
            return  # parameters without elements
        host = torch.from_numpy(np.concatenate([rows.ravel(), np.repeat(np.arange(len(rows)), num_programs)]))
        table = host.pin_memory().to(self._device, non_blocking=True)  # unpinned, it would be waited for
        with torch.cuda.device(self._device):
            self._kernel[(int(ends[-1]),)](
                table,
                len(rows),
                GRADIENT=self._types[gradient],
                TOTAL=self._types[total],
                PEAK=self._types[peaks],
                PEAK_BITS=self._bits[peaks],
                IS_ROUNDED=is_rounded,
                CHUNK=_CHUNK,
                BLOCK=_BLOCK,
                enable_fp_fusion=False,  # product and anchor added in one would be rounded once, not twice
            )


def fused_addition(device: torch.device) -> FusedAddition | None:
    """None, with the reason in the log, where the kernel cannot be had; sums are the same without it."""
    if device.type != "cuda":
        return None
    if os.environ.get(SWITCH) == "0":
        logger.info("gradients are added one by one on %s: %s=0", device, SWITCH)
        return None
    try:
        return _on(device)
    except Exception as error:  # Triton's errors are many: no such package, no compiler, no support for the device
        reason = str(error).partition("\n")[0] or type(error).__name__
        logger.info("gradients are added one by one on %s: the kernel that adds many failed: %s", device, reason)
        return None


@cache
def _on(device: torch.device) -> FusedAddition:
    return FusedAddition(device)


def _bits(number: float) -> int:
    """Of a float64, as an integer: Triton would hand the kernel a float as float32."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)
