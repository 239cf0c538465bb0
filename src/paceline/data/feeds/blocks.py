"""Micro-batches of columns in memory, gathered several at once.

Gathering a few rows costs some microseconds however few they are: a tenth of a small model's step. Gathered together,
micro-batches share that. They are cut apart again before anybody sees them, each with memory of its own.

PACELINE_BLOCKS=0 turns it off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from paceline.data.epochs import CutEpoch, Epoch
from paceline.data.sources.base import Indices, Move

logger = logging.getLogger("paceline")

SWITCH = "PACELINE_BLOCKS"
# Small enough to stay in a core's cache until the last of a block's micro-batches is used.
BLOCK_BYTES = 256 << 10
MAX_AT_ONCE = 64
# Every micro-batch starts on a cache line, as one by itself does: kernels take other paths for unaligned memory.
ALIGNMENT_BYTES = 64


class Gathered(Protocol):
    """A source that has its samples as rows of tensors."""

    def row_bytes(self) -> list[int]:
        """The size of a sample in every column."""

    def read_parts(self, indices: Indices, num_samples: int, move: Move | None = None) -> list[Any]:
        """These samples as micro-batches of `num_samples` each, all of them moved to where they are wanted."""


class Blocks:
    """Hands out an epoch's micro-batches to one worker, which mostly takes those that it was expected to take."""

    def __init__(self, source: Gathered, epoch: CutEpoch, at_once: int, move: Move | None = None) -> None:
        self._source = source
        self._move = move
        self._epoch = epoch
        self._at_once = at_once
        self._micro_batch = epoch.steps.micro_batch
        self._num_whole = epoch.steps.num_samples // self._micro_batch  # the last one may be smaller
        self._numbers: list[int] = []  # of the micro-batches that are there, the next one last
        self._parts: list[Any] = []

    def take(self, number: int, upcoming: Callable[[int], Iterable[range]]) -> Any:
        """Micro-batch `number`; None for one that is read by itself.

        `upcoming(number)`: those that will most likely be taken from this one on.
        """
        if not self._numbers or number != self._numbers[-1]:
            # A micro-batch that is asked for again is read again: its user may have changed it in place.
            runs = self._next_block(upcoming(number))
            self._numbers = [number for run in reversed(runs) for number in reversed(run)]
            if len(self._numbers) < 2:
                self._numbers = []
                return None
            indices = np.concatenate([self._epoch.request(run.start, len(run)).indices for run in runs])
            self._parts = self._source.read_parts(indices, self._micro_batch, self._move)
            self._parts.reverse()
        self._numbers.pop()
        return self._parts.pop()

    def _next_block(self, upcoming: Iterable[range]) -> list[range]:
        runs: list[range] = []
        num_missing = self._at_once
        for run in upcoming:
            run = range(run.start, min(run.stop, run.start + num_missing, self._num_whole))
            if not run:
                break
            runs.append(run)
            num_missing -= len(run)
        return runs


def blocks_of(source: Any, epoch: Epoch, move: Move | None = None) -> Blocks | None:
    """For columns whose micro-batches are small and fill whole cache lines; None for anything else.

    The log says why columns do not come in blocks.
    """
    if not hasattr(source, "read_parts") or not isinstance(epoch, CutEpoch):
        return None
    sizes = [epoch.steps.micro_batch * num_bytes for num_bytes in source.row_bytes()]
    at_once = min(MAX_AT_ONCE, BLOCK_BYTES // max(1, *sizes))
    if os.environ.get(SWITCH) == "0":
        reason = f"{SWITCH}=0"
    elif at_once < 2:
        reason = f"a column of one has {max(sizes):,} bytes, and two would not fit {BLOCK_BYTES:,}"
    elif any(size % ALIGNMENT_BYTES for size in sizes):
        reason = f"their columns have {sizes} bytes, not all multiples of {ALIGNMENT_BYTES}"
    else:
        return Blocks(source, epoch, at_once, move)
    logger.debug("micro-batches are gathered one by one: %s", reason)
    return None
