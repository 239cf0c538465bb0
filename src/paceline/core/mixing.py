"""The finalizer of splitmix64, on which all random orders and seeds are based."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15  # the increment of splitmix64
MASK = (1 << 64) - 1
_FACTOR_1, _FACTOR_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(value: int) -> int:
    """A bijection of 64-bit integers in which every input bit affects all output bits."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * _FACTOR_1) & MASK
    value = ((value ^ (value >> 27)) * _FACTOR_2) & MASK
    return value ^ (value >> 31)


def mix64_each(values: Words) -> Words:
    """`mix64` of every element, in place. The order of an epoch is computed with it."""
    values += np.uint64(GOLDEN)
    values ^= values >> np.uint64(30)
    values *= np.uint64(_FACTOR_1)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_FACTOR_2)
    values ^= values >> np.uint64(31)
    return values
