"""Micro-batches of columns in memory, gathered several at once.

Gathering a few rows costs some microseconds however few they are: a tenth of a small model's step. Gathered together,
micro-batches share that. They are cut apart again before anybody sees them, each with memory of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

from paceline.data.orders import CutEpoch, Epoch
from paceline.data.sources import Indices

# Small enough to stay in a core's cache until the last of a block's micro-batches is used.
BLOCK_BYTES = 256 << 10
MAX_AT_ONCE = 16
# Every micro-batch starts on a cache line, as one by itself does: kernels take other paths for unaligned memory.
ALIGNMENT_BYTES = 64


class Gathered(Protocol):
    """A source that has its samples as rows of tensors."""

    def row_bytes(self) -> list[int]:
        """The size of a sample in every column."""

    def read_parts(self, indices: Indices, num_samples: int) -> list[Any]:
        """These samples as micro-batches of `num_samples` each."""


class Blocks:
    """Hands out an epoch's micro-batches to one worker, which takes them mostly in their order."""

    def __init__(self, source: Gathered, epoch: CutEpoch, at_once: int) -> None:
        self._source = source
        self._epoch = epoch
        self._at_once = at_once
        self._micro_batch = epoch.steps.micro_batch
        self._num_whole = epoch.steps.num_samples // self._micro_batch  # the last one may be smaller
        self._next = 0
        self._parts: list[Any] = []

    def take(self, number: int, stop: int) -> Any:
        """Micro-batch `number`, where those up to `stop` will most likely be asked for next; None for one by itself."""
        if not self._parts or number != self._next:
            # A micro-batch that is asked for again is read again: its user may have changed it in place.
            stop = min(stop, number + self._at_once, self._num_whole)
            if stop <= number + 1:
                return None
            indices = self._epoch.request(number, stop - number).indices
            self._parts = self._source.read_parts(indices, self._micro_batch)
            self._parts.reverse()
        self._next = number + 1
        return self._parts.pop()


def blocks_of(source: Any, epoch: Epoch) -> Blocks | None:
    """For columns whose micro-batches are small and fill whole cache lines; None for anything else."""
    if not hasattr(source, "read_parts") or not isinstance(epoch, CutEpoch):
        return None
    sizes = [epoch.steps.micro_batch * num_bytes for num_bytes in source.row_bytes()]
    at_once = min(MAX_AT_ONCE, BLOCK_BYTES // max(1, *sizes))
    if at_once < 2 or any(size % ALIGNMENT_BYTES for size in sizes):
        return None
    return Blocks(source, epoch, at_once)
