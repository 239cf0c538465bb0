"""The GPU kernel of exact sums. Imported only where Triton is installed."""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit(do_not_specialize=["num_blocks", "weight_bits"])  # type: ignore[untyped-decorator]
def add_rounded(
    gradient: tl.tensor,
    total: tl.tensor,
    owner_of_block: tl.tensor,
    anchor_of_owner: tl.tensor,
    peak_bits: tl.tensor,
    num_blocks: tl.tensor,
    weight_bits: tl.tensor,
    IS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """total += round(weight * gradient), and each owner's peak = max(peak, |weight * gradient|). All float64."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_inside = rows < num_blocks
    columns = tl.arange(0, BLOCK)[None, :]
    places = rows[:, None].to(tl.int64) * BLOCK + columns
    mask = is_inside[:, None] & (columns < BLOCK)
    owner = tl.load(owner_of_block + rows, mask=is_inside, other=0)
    weight = weight_bits.to(tl.int64).to(tl.float64, bitcast=True)
    term = tl.load(gradient + places, mask=mask, other=0.0).to(tl.float64) * weight
    anchor = tl.load(anchor_of_owner + owner)[:, None]
    rounded = (term + anchor) - anchor
    if IS_FIRST:
        tl.store(total + places, rounded, mask=mask)
    else:
        tl.store(total + places, tl.load(total + places, mask=mask, other=0.0) + rounded, mask=mask)
    # The bits of floats without a sign are ordered as the floats are, with NaN above all: a maximum keeps it.
    largest = tl.max(tl.abs(term).to(tl.int64, bitcast=True), axis=1)
    first = tl.load(owner_of_block + tl.program_id(0) * ROWS)
    last = tl.load(owner_of_block + tl.minimum(tl.program_id(0) * ROWS + ROWS, num_blocks) - 1)
    if first == last:  # nearly always: one atomic operation instead of many on one address
        tl.atomic_max(peak_bits + first, tl.max(largest, axis=0))
    else:
        tl.atomic_max(peak_bits + owner, largest, mask=is_inside)
