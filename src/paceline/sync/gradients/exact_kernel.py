"""The GPU kernels of exact sums. Imported only where Triton is installed.

They read gradients at the addresses where autograd left them. A program processes one chunk of one parameter. Tables
have, by parameter, the address of its gradient (0 for a missing one, which counts as zeros), its number of elements,
its first chunk, and its offset in flat buffers.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit  # type: ignore[untyped-decorator]
def _load_chunk(
    addresses: tl.tensor, numels: tl.tensor, first_chunks: tl.tensor, owner: tl.tensor,
    DTYPE: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The chunk's elements, their addresses, which of them belong to the gradient, and their indices in it.

    GROUP: elements loaded at a time, up to 16 bytes. Memory is allocated in larger groups.
    """
    address = tl.load(addresses + owner)
    numel = tl.where(address != 0, tl.load(numels + owner), 0)
    start = (tl.program_id(0) - tl.load(first_chunks + owner)).to(tl.int64) * CHUNK
    columns = tl.arange(0, CHUNK)
    GROUP_BYTES: tl.constexpr = GROUP * DTYPE.primitive_bitwidth // 8
    source = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), GROUP_BYTES) + (start + columns)
    loaded = tl.load(source, mask=start + columns // GROUP * GROUP < numel, other=0.0)
    is_element = start + columns < numel
    return tl.where(is_element, loaded, 0.0), source, is_element, start + columns


@triton.jit  # type: ignore[untyped-decorator]
def _raise_peak(number: tl.tensor, peak_bits: tl.tensor) -> None:
    """peak = max(peak, |number|), as bits of float64. number: float32 or float64.

    The bits of floats without a sign are ordered as the floats are, with NaN above all: a maximum keeps it.
    """
    BITS: tl.constexpr = tl.int64 if number.dtype == tl.float64 else tl.int32
    largest = tl.max(tl.abs(number).to(BITS, bitcast=True), axis=0).to(number.dtype, bitcast=True)
    tl.atomic_max(peak_bits, largest.to(tl.float64).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["weight_bits", "peak_bits"])  # type: ignore[untyped-decorator]
def add_rounded(
    addresses: tl.tensor, numels: tl.tensor, first_chunks: tl.tensor, owner_of_chunk: tl.tensor, offsets: tl.tensor,
    anchors: tl.tensor, peak_bits: tl.tensor, total: tl.tensor, mean: tl.tensor, weight_bits: tl.tensor,
    IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """total += round(weight * gradient), and each parameter's peak = max(peak, |weight * gradient|). All float64.

    IS_FIRST overwrites the total. IS_LAST writes the sum to `mean`, in the gradients' dtype, instead of to the total.
    """
    DTYPE: tl.constexpr = mean.dtype.element_ty
    owner = tl.load(owner_of_chunk + tl.program_id(0))
    gradient, _, _, index = _load_chunk(addresses, numels, first_chunks, owner, DTYPE, CHUNK, 2)  # as float64
    term = gradient.to(tl.float64) * weight_bits.to(tl.int64).to(tl.float64, bitcast=True)
    anchor = tl.load(anchors + owner)
    value = (term + anchor) - anchor
    places = tl.multiple_of(tl.load(offsets + owner), BLOCK) + index
    # To the end of the parameter's last block: the elements behind the parameter's are zero.
    mask = index < tl.multiple_of(tl.cdiv(tl.load(numels + owner), BLOCK) * BLOCK, BLOCK)
    if not IS_FIRST:
        value += tl.load(total + places, mask=mask, other=0.0)
    if IS_LAST:
        # Through float32, as torch converts float64 to half precision.
        result = value if mean.dtype.element_ty == tl.float64 else value.to(tl.float32).to(DTYPE)
        tl.store(mean + places, result, mask=mask)
    else:
        tl.store(total + places, value, mask=mask)
    _raise_peak(term, peak_bits + owner)


@triton.jit  # type: ignore[untyped-decorator]
def clear_signs_of_zeros(
    addresses: tl.tensor, numels: tl.tensor, first_chunks: tl.tensor, owner_of_chunk: tl.tensor, peak_bits: tl.tensor,
    like: tl.tensor, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Turn -0.0 into 0.0 in place, and each parameter's peak = max(peak, |gradient|)."""
    DTYPE: tl.constexpr = like.dtype.element_ty
    owner = tl.load(owner_of_chunk + tl.program_id(0))
    GROUP: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    gradient, source, is_element, _ = _load_chunk(addresses, numels, first_chunks, owner, DTYPE, CHUNK, GROUP)
    number = gradient if like.dtype.element_ty == tl.float64 else gradient.to(tl.float32)
    BITS: tl.constexpr = tl.int64 if number.dtype == tl.float64 else tl.int32
    is_negative_zero = (number == 0.0) & (number.to(BITS, bitcast=True) < 0)
    tl.store(source, tl.zeros_like(gradient), mask=is_element & is_negative_zero)
    _raise_peak(number, peak_bits + owner)
