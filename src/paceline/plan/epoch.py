"""An epoch as numbers: the order of its samples, its steps and micro-batches, and a run's position in it.

The order is a pure function of (length, seed, epoch): no library's random stream is involved, so it is the same in
every process, after every resume and in every version, and any part of it can be computed without the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.core.seeding import GOLDEN, MASK, Words, mix64_each
from paceline.plan.entries import check_entries

Indices: TypeAlias = npt.NDArray[np.int64]

# Epochs up to this length are ordered by sorting hashes: uniform over all permutations also for tiny lengths, where the
# halves of a Feistel network would be too small to mix. At the limit this costs some milliseconds and 512 KiB.
_MAX_SORTED = 1 << 16
# Longer epochs use a Feistel network. Up to 4 rounds, statistics of neighbours, fixed points and colliding halves
# differ from those of random permutations; from 5 on they do not, and 8 leave a margin. An even number of rounds ends
# with the halves in place.
_ROUNDS = 8
# Positions computed at once: NumPy's overhead per call is spread over many samples, and everything stays in cache.
_BLOCK = 4096

_STEP, _HALF = np.uint64(GOLDEN), np.uint64(32)
# Of a step: each micro-batch has its own slot in the exchanged numbers.
MAX_MICRO_BATCHES = 1 << 20


@dataclass(frozen=True)
class Steps:
    """How an epoch of `num_samples` is cut into steps and micro-batches.

    The epoch's order is cut into consecutive micro-batches of `micro_batch` samples, of which `global_batch` samples
    make a step. The last micro-batch and the last step may be smaller; `drop_last` leaves a smaller last step out.
    """

    num_samples: int
    global_batch: int
    micro_batch: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        if type(self.num_samples) is int and self.num_samples == 0:
            raise ValueError("the data is empty (num_samples=0): give at least one sample")
        for name in ("num_samples", "global_batch", "micro_batch"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is not a positive integer: choose {name} >= 1")
        if self.micro_batch > self.global_batch:
            raise ValueError(
                f"micro_batch={self.micro_batch} does not fit global_batch={self.global_batch}: "
                f"choose micro_batch <= {self.global_batch}"
            )
        if self.max_micro_batches > MAX_MICRO_BATCHES:
            raise ValueError(
                f"global_batch={self.global_batch} with micro_batch={self.micro_batch} makes a step of "
                f"{self.max_micro_batches} micro-batches, more than {MAX_MICRO_BATCHES}: choose "
                f"global_batch <= {self.micro_batch * MAX_MICRO_BATCHES}, or a larger micro_batch"
            )
        if remainder := self.global_batch % self.micro_batch:
            below = self.global_batch - remainder
            choices = f"global_batch={below} or {below + self.micro_batch}"
            if self.global_batch < 1 << 40:  # finding divisors of more would take seconds
                smaller, larger = _nearest_divisors(self.global_batch, self.micro_batch)
                choices += f", or micro_batch={smaller} or {larger}"
            raise ValueError(
                f"global_batch={self.global_batch} is not a multiple of micro_batch={self.micro_batch}: "
                f"choose {choices}"
            )
        if self.drop_last and self.num_samples < self.global_batch:
            raise ValueError(
                f"drop_last=True leaves no step of num_samples={self.num_samples} with "
                f"global_batch={self.global_batch}: choose global_batch <= {self.num_samples} or drop_last=False"
            )

    # Cached: read once per micro-batch.
    @cached_property
    def num_steps(self) -> int:
        """Steps in an epoch if each has the size of the global batch; at least one."""
        return self.num_samples // self.global_batch if self.drop_last else -(-self.num_samples // self.global_batch)

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches in an epoch."""
        whole = self.num_steps * self.max_micro_batches
        return whole if self.drop_last else min(whole, -(-self.num_samples // self.micro_batch))

    @cached_property
    def max_micro_batches(self) -> int:
        """Micro-batches of a full step."""
        return self.global_batch // self.micro_batch

    def sample_range(self, first: int, count: int = 1) -> range:
        """The positions, in the epoch's order, of the samples of `count` micro-batches from number `first` on."""
        if not (first >= 0 and count >= 1 and first + count <= self.num_micro_batches):
            raise ValueError(
                f"micro-batches {first} to {first + count - 1} are not in an epoch of {self.num_micro_batches}: "
                f"choose 0 <= micro-batch < {self.num_micro_batches}"
            )
        return range(first * self.micro_batch, min((first + count) * self.micro_batch, self.num_samples))


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _nearest_divisors(number: int, near: int) -> tuple[int, int]:
    """The largest divisor of `number` below `near` and the smallest above, for 1 < near < number."""
    found = divisors(number)
    return max(d for d in found if d < near), min(d for d in found if d > near)


class Position(NamedTuple):
    """Where a run is. Small, serialisable, independent of the number of workers.

    `micro_batch`: completed micro-batches of this epoch. `step`: completed steps of the run.
    """

    epoch: int = 0
    micro_batch: int = 0
    step: int = 0

    def after_step(self, num_micro_batches: int, steps: Steps) -> Position:
        """The position after a step of `num_micro_batches`; an epoch's last step leads to the next epoch."""
        done = self.micro_batch + num_micro_batches
        if done > steps.num_micro_batches:
            raise ValueError(
                f"position's micro_batch={self.micro_batch} and {num_micro_batches} more are not in an epoch of "
                f"{steps.num_micro_batches}: resume with the data and micro-batch the position comes from"
            )
        if done == steps.num_micro_batches:
            return Position(self.epoch + 1, 0, self.step + 1)
        return Position(self.epoch, done, self.step + 1)

    def next_epoch(self) -> Position:
        """The start of the next epoch, for a stream whose data has ended."""
        return Position(self.epoch + 1, 0, self.step)

    def to_dict(self) -> dict[str, int]:
        return self._asdict()

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> Position:
        """The position that `to_dict` wrote. A missing, unknown or invalid entry is a ValueError that names it."""
        check_entries("position", values, cls._fields)
        for name, value in values.items():
            if type(value) is not int or value < 0:
                raise ValueError(f"position's {name}={value!r} is not a count: it must be an integer >= 0")
        return cls(**values)


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
        """The block that begins with the wanted positions; all positions of a small epoch."""
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
        """Cycle walking: the network permutes range(a * b), and results outside of range(length) go through it again.

        This ends, since a cycle leads back to its start. It is rare, since fewer than `a` numbers are outside.
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
