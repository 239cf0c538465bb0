"""splitmix64's finaliser, of which all that is random here is made: of one number, and of many at once."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]

# The step between the generator's states, and the finaliser's shifts and factors.
GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHIFTS = 30, 27, 31
MASK = (1 << 64) - 1

_GOLDEN_WORD = np.uint64(GOLDEN)
_FACTOR_1, _FACTOR_2 = map(np.uint64, _FACTORS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = map(np.uint64, _SHIFTS)


def mix64(value: int) -> int:
    """A bijection of 64-bit integers that spreads every input bit over all output bits."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> _SHIFTS[0])) * _FACTORS[0]) & MASK
    value = ((value ^ (value >> _SHIFTS[1])) * _FACTORS[1]) & MASK
    return value ^ (value >> _SHIFTS[2])


def mix64_each(values: Words) -> Words:
    """`mix64` of every one, in place: an epoch's order is computed with it."""
    values += _GOLDEN_WORD
    values ^= values >> _SHIFT_1
    values *= _FACTOR_1
    values ^= values >> _SHIFT_2
    values *= _FACTOR_2
    values ^= values >> _SHIFT_3
    return values
