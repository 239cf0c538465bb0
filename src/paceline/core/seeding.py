"""Random numbers that belong to the work, not to the worker.

Every seed is a hash of the numbers that identify its use: (seed, step, micro-batch) for a forward pass, (seed, epoch,
sample) for an augmentation. No seed depends on a rank or on earlier draws. Torch's generators are in generators.py.
"""

from __future__ import annotations

import enum
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]

# The finalizer of splitmix64, on which all random orders and seeds are based.
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


class Purpose(enum.IntEnum):
    """Separates the streams of different uses."""

    MODEL_INIT = 1
    MICRO_BATCH = 2
    AFTER_STEP = 3
    EVALUATION = 4
    SAMPLE = 5
    SAMPLE_BLOCK = 6
    SHUFFLE_BUFFER = 7
    ORDER = 8
    COMPRESSION = 9


def derive_seed(seed: int, purpose: Purpose, *numbers: int) -> int:
    """A 63-bit seed for one use, from the run's seed and the numbers that identify the use."""
    state = _stream(seed, int(purpose))  # an enum is hashed by Python code
    for number in numbers:
        state = mix64(state ^ (number & MASK))
    return state >> 1


@lru_cache(maxsize=64)
def _stream(seed: int, purpose: int) -> int:
    return mix64(mix64(seed & MASK) ^ purpose)
