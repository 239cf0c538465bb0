"""The GPU kernel of `fused.py`. Imported only there, and only where Triton is installed."""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

# A row of the table: addresses of gradient, sum and peak, then the number of elements, the first program that works
# on them, the bits of weight and anchor as float64, and whether the sum is to be overwritten.
COLUMNS = tl.constexpr(8)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def add_gradients(
    table: tl.tensor,
    num_rows: tl.tensor,
    GRADIENT: tl.constexpr,
    TOTAL: tl.constexpr,
    PEAK: tl.constexpr,
    PEAK_BITS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: `CHUNK` elements of the gradient whose row stands behind the rows, at this program's place."""
    program = tl.program_id(0)
    row = table + COLUMNS * tl.load(table + COLUMNS * num_rows + program)
    gradient = tl.load(row).to(tl.pointer_type(GRADIENT))
    total = tl.load(row + 1).to(tl.pointer_type(TOTAL))
    peak = tl.load(row + 2).to(tl.pointer_type(PEAK_BITS))
    numel = tl.load(row + 3)
    begin = (program - tl.load(row + 4)) * CHUNK
    weight = tl.load(row + 5).to(tl.float64, bitcast=True).to(TOTAL)
    anchor = tl.load(row + 6).to(tl.float64, bitcast=True).to(TOTAL)
    is_added_to = tl.load(row + 7) == 0
    largest = tl.zeros((BLOCK,), PEAK_BITS)
    for start in range(begin, tl.minimum(begin + CHUNK, numel), BLOCK):
        places = start + tl.arange(0, BLOCK)
        is_inside = places < numel
        x = tl.load(gradient + places, mask=is_inside, other=0.0)
        # The bits of floats without a sign are ordered as the floats are, with NaN above all: a maximum keeps it.
        largest = tl.maximum(largest, tl.abs(x.to(PEAK)).to(PEAK_BITS, bitcast=True))
        term = x.to(TOTAL) * weight
        if IS_ROUNDED:
            term = (term + anchor) - anchor
        before = tl.load(total + places, mask=is_inside & is_added_to, other=0.0)
        tl.store(total + places, before + term, mask=is_inside)
    tl.atomic_max(peak, tl.max(largest, 0))
