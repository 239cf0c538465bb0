"""The order in which an epoch visits its samples.

A pure function of (length, seed, epoch): no library's random stream is involved, so the order is the same in every
process, after every resume and in every version, and any part of it can be computed without the rest.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.core.seeding import GOLDEN, MASK, Words, mix64_each

Indices: TypeAlias = npt.NDArray[np.int64]

# Up to here an epoch is ordered by sorting hashes: uniform over all permutations for the tiniest lengths too, where
# the halves of a Feistel network would be too small to mix. At the limit it costs some milliseconds and 512 KiB.
_MAX_SORTED = 1 << 16
# Beyond, a Feistel network. Statistics of neighbours, fixed points and colliding halves tell it from random
# permutations up to 4 rounds and no longer from 5 on; 8 leave a margin. An even number ends with the halves in place.
_ROUNDS = 8
# Positions computed at once: NumPy's overhead per call is spread over many samples, and everything stays in cache.
_BLOCK = 4096

_STEP, _HALF = np.uint64(GOLDEN), np.uint64(32)


def _splitmix(key: int, numbers: Words) -> Words:
    """The outputs with these numbers of a splitmix64 generator seeded with `key`; different numbers never collide."""
    states = numbers * _STEP
    states += np.uint64(key & MASK)
    return mix64_each(states)


def _derive(key: int, number: int) -> int:
    return int(_splitmix(key, np.array([number], np.uint64))[0])


class EpochOrder:
    """The order in which an epoch visits its samples: a keyed permutation of range(length), computed in blocks.

    Construction takes microseconds and memory is constant, at any length. `shuffle=False` keeps the order of the data.
    """

    def __init__(self, length: int, *, seed: int, epoch: int, shuffle: bool = True) -> None:
        if not 0 <= length < 1 << 63:
            raise ValueError(f"length={length} is not a number of samples: choose 0 <= length < 2**63")
        if not 0 <= epoch < 1 << 63:
            raise ValueError(f"epoch={epoch} is not an epoch's number: choose 0 <= epoch < 2**63")
        self._length = length
        self._shuffle = shuffle
        self._key = _derive(_derive(seed, 0), epoch)
        self._round_keys: list[int] = _splitmix(self._key, np.arange(_ROUNDS, dtype=np.uint64)).tolist()
        # The block last computed, with the positions it covers: one tuple, so that threads never see half a change.
        self._block: tuple[int, int, Indices] = (0, 0, np.empty(0, np.int64))

    def indices(self, start: int, stop: int) -> Indices:
        """The sample indices at positions start..stop-1. A view of a shared block: not to be modified."""
        first, last, block = self._block
        if not first <= start <= stop <= last:
            first, last, block = self._block = self._load(start, stop)
        return block[start - first : stop - first]

    def _load(self, start: int, stop: int) -> tuple[int, int, Indices]:
        """The block that begins with the wanted positions; all positions where the epoch is small."""
        if not 0 <= start <= stop <= self._length:
            raise ValueError(
                f"positions start={start}, stop={stop} are not in an epoch of {self._length} samples: "
                f"choose 0 <= start <= stop <= {self._length}"
            )
        if self._length <= _MAX_SORTED:
            first, last = 0, self._length
        else:
            first, last = start, min(max(stop, start + _BLOCK), self._length)
        positions = np.arange(first, last, dtype=np.uint64)
        if not self._shuffle:
            return first, last, positions.view(np.int64)
        if self._length <= _MAX_SORTED:
            # The hashes are distinct, so that any sorting algorithm gives the same result.
            return first, last, np.argsort(_splitmix(self._key, positions)).astype(np.int64, copy=False)
        return first, last, self._permute(positions)

    def _permute(self, positions: Words) -> Indices:
        """The network permutes a rows * b columns >= length: who lands outside of range(length) goes through it again.

        That ends, since a cycle leads back to where it started; and it is rare, since fewer than a places are outside.
        """
        indices = self._network(positions)
        while (outside := np.flatnonzero(indices >= np.uint64(self._length))).size:
            indices[outside] = self._network(indices[outside])
        return indices.view(np.int64)

    def _network(self, places: Words) -> Words:
        """A keyed permutation of range(a * b): each half in turn is moved by a hash of the other, modulo its size."""
        a = math.isqrt(self._length - 1) + 1
        b = -(-self._length // a)
        num_columns = np.uint64(b)
        row = places // num_columns
        column = places - row * num_columns
        left, right, modulus, other = row, column, np.uint64(a), num_columns
        for key in self._round_keys:
            shift = _splitmix(key, right)
            # The upper 32 bits as a fraction of `modulus` (below 2**32, as length < 2**63): no slow division.
            shift >>= _HALF
            shift *= modulus
            shift >>= _HALF
            shift += left
            # shift % modulus for shift < 2 * modulus: below it, the difference wraps to a huge number.
            np.minimum(shift, shift - modulus, out=shift)
            left, right, modulus, other = right, shift, other, modulus
        return left * num_columns + right
