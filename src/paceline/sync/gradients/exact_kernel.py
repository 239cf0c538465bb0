"""The GPU kernels of exact sums. Imported only where Triton is installed.

They read gradients at the addresses where autograd left them. Everything about a parameter is in tables: its address
(0 for a gradient that is missing and counts as zeros), its number of elements, and its first block of a flat buffer.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit  # type: ignore[untyped-decorator]
def _places_in_gradients(
    addresses: tl.tensor, first_blocks: tl.tensor, numels: tl.tensor, owner: tl.tensor, rows: tl.tensor,
    is_inside: tl.tensor, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Pointers to the elements of some blocks, which of them may be loaded, and which belong to the parameter."""
    address = tl.multiple_of(tl.load(addresses + owner, mask=is_inside, other=0), 16)
    columns = tl.arange(0, BLOCK)[None, :]
    first = (rows - tl.load(first_blocks + owner, mask=is_inside, other=0)).to(tl.int64)[:, None] * BLOCK
    numel = tl.where(address != 0, tl.load(numels + owner, mask=is_inside, other=0), 0)[:, None]
    # Whole groups of 16 bytes are loaded, which needs fewer instructions. Memory is allocated in such groups.
    GROUP: tl.constexpr = 16 // (DTYPE.primitive_bitwidth // 8)
    may_load = first + columns // GROUP * GROUP < numel
    return address.to(tl.pointer_type(DTYPE))[:, None] + (first + columns), may_load, first + columns < numel


@triton.jit  # type: ignore[untyped-decorator]
def _raise_peaks(
    magnitude_bits: tl.tensor, peak_bits: tl.tensor, owner_of_block: tl.tensor, owner: tl.tensor, is_inside: tl.tensor,
    num_blocks: tl.tensor, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Each owner's peak = max(peak, its magnitudes), all as bits of float64.

    The bits of floats without a sign are ordered as the floats are, with NaN above all: a maximum keeps it.
    """
    largest = tl.max(magnitude_bits, axis=1)
    first = tl.load(owner_of_block + tl.program_id(0) * ROWS)
    last = tl.load(owner_of_block + tl.minimum(tl.program_id(0) * ROWS + ROWS, num_blocks) - 1)
    if first == last:  # nearly always: one atomic operation instead of many on one address
        tl.atomic_max(peak_bits + first, tl.max(largest, axis=0))
    else:
        tl.atomic_max(peak_bits + owner, largest, mask=is_inside)


@triton.jit(do_not_specialize=["num_blocks", "weight_bits"])  # type: ignore[untyped-decorator]
def add_rounded(
    addresses: tl.tensor, first_blocks: tl.tensor, numels: tl.tensor, owner_of_block: tl.tensor,
    anchor_of_owner: tl.tensor, peak_bits: tl.tensor, total: tl.tensor, mean: tl.tensor, num_blocks: tl.tensor,
    weight_bits: tl.tensor, IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """total += round(weight * gradient), and each owner's peak = max(peak, |weight * gradient|). All float64.

    IS_FIRST overwrites the total. IS_LAST writes the sum to `mean`, in the gradients' dtype, instead of to the total.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_inside = rows < num_blocks
    owner = tl.load(owner_of_block + rows, mask=is_inside, other=0)
    DTYPE: tl.constexpr = mean.dtype.element_ty
    source, may_load, is_element = _places_in_gradients(
        addresses, first_blocks, numels, owner, rows, is_inside, DTYPE, BLOCK
    )
    gradient = tl.where(is_element, tl.load(source, mask=may_load, other=0.0), 0.0)
    term = gradient.to(tl.float64) * weight_bits.to(tl.int64).to(tl.float64, bitcast=True)
    anchor = tl.load(anchor_of_owner + owner)[:, None]
    rounded = (term + anchor) - anchor
    places = rows[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = is_inside[:, None] & (tl.arange(0, BLOCK)[None, :] < BLOCK)
    if not IS_FIRST:
        rounded += tl.load(total + places, mask=mask, other=0.0)
    if IS_LAST:
        # By way of float32, as torch converts float64 to half precision.
        value = rounded if mean.dtype.element_ty == tl.float64 else rounded.to(tl.float32).to(DTYPE)
        tl.store(mean + places, value, mask=mask)
    else:
        tl.store(total + places, rounded, mask=mask)
    bits = tl.abs(term).to(tl.int64, bitcast=True)
    _raise_peaks(bits, peak_bits, owner_of_block, owner, is_inside, num_blocks, ROWS)


@triton.jit(do_not_specialize=["num_blocks"])  # type: ignore[untyped-decorator]
def clear_signs_of_zeros(
    addresses: tl.tensor, first_blocks: tl.tensor, numels: tl.tensor, owner_of_block: tl.tensor, peak_bits: tl.tensor,
    like: tl.tensor, num_blocks: tl.tensor, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Turn -0.0 into 0.0 in place, and each owner's peak = max(peak, |gradient|)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_inside = rows < num_blocks
    owner = tl.load(owner_of_block + rows, mask=is_inside, other=0)
    DTYPE: tl.constexpr = like.dtype.element_ty
    source, may_load, is_element = _places_in_gradients(
        addresses, first_blocks, numels, owner, rows, is_inside, DTYPE, BLOCK
    )
    gradient = tl.where(is_element, tl.load(source, mask=may_load, other=0.0), 0.0)
    number = gradient.to(tl.float64)
    bits = number.to(tl.int64, bitcast=True)
    is_negative_zero = (number == 0.0) & (bits < 0)
    tl.store(source, tl.zeros_like(gradient), mask=is_element & is_negative_zero)
    magnitude_bits = tl.abs(number).to(tl.int64, bitcast=True)
    _raise_peaks(magnitude_bits, peak_bits, owner_of_block, owner, is_inside, num_blocks, ROWS)
