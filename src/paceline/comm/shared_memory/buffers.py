"""Buffers in shared memory: one part per worker of the host, at the same offset of every segment.

Small buffers are copied to where the peers can read them, and every worker sums all copies: one synchronization. Large
buffers are divided into blocks, and workers that wait claim blocks: the claimant sums a block over all parts in rank
order and writes the sum to all parts, so every byte is read once and written once: two synchronizations. A worker that
has started the exchange but is busy does not delay the others, and the result does not depend on which worker sums a
block. Buffers of a world with several hosts are summed by the host's leader; see `bridge`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from paceline.comm.shared_memory.peers import LocalPeers
from paceline.comm.shared_memory.segment import BlockClaims

# Up to this size, a second synchronization would cost more than summing everything on every worker.
SMALL_BYTES = 32 << 10
# The blocks of all workers fit into a core's cache.
BLOCK_BYTES = 256 << 10
ALIGNMENT_BYTES = 64
# Between hosts, a buffer travels in pieces of this size for each host, so that sums and network overlap.
PIECE_BYTES = 1 << 20
# Torch uses one thread for up to this many elements: a leader's thread must not take cores from the workers.
_SINGLE_THREAD_NUMEL = 32704


class SharedBuffer(ABC):
    """A buffer that `empty` allocates.

    Data that peers may still read when the next exchange of the same buffer starts is double-buffered. Two turns
    suffice: a worker that starts the next but one exchange has seen all peers start the next one, and so end this one.
    """

    def __init__(self, peers: LocalPeers, name: str, parts: Sequence[torch.Tensor]) -> None:
        self._peers = peers
        self.name = name
        self._index = peers.segments.index(peers.own)
        self.parts = parts
        self.tensor = parts[self._index]
        self.is_busy = False
        self.turn = 0  # alternates between 0 and 1

    def publish(self) -> None:  # noqa: B027 - most kinds have nothing to do
        """Called before the call is announced to the peers."""

    @abstractmethod
    def complete(self, number: int, call: str, source: int | None) -> None:
        """Wait for the peers, then replace the tensor by the sum over all workers, or by rank `source`'s tensor."""


class SmallBuffer(SharedBuffer):
    def __init__(self, peers: LocalPeers, name: str, parts: Sequence[torch.Tensor]) -> None:
        super().__init__(peers, name, parts)
        self._copies = [allocate(peers, self.tensor.numel(), self.tensor.dtype)[1] for _ in range(2)]

    def publish(self) -> None:
        self._copies[self.turn][self._index].copy_(self.tensor)

    def complete(self, number: int, call: str, source: int | None) -> None:
        self._peers.wait_for_calls(number, call)
        copies = self._copies[self.turn]
        if source is None:
            add_up(copies, self.tensor)
        else:
            self.tensor.copy_(copies[source])


class LargeBuffer(SharedBuffer):
    def __init__(self, peers: LocalPeers, name: str, parts: Sequence[torch.Tensor]) -> None:
        super().__init__(peers, name, parts)
        size, itemsize = len(parts), self.tensor.itemsize
        self._block_numel = min(BLOCK_BYTES, aligned(-(-self.tensor.nbytes // size))) // itemsize
        self._blocks = list(zip(*(part.split(self._block_numel) for part in parts), strict=True))
        num_blocks = len(self._blocks)
        self._claims = BlockClaims(peers.segments[0], peers.own.allocate(BlockClaims.nbytes(num_blocks)), num_blocks)
        if self._index == 0:
            self._claims.initialize()
        # Workers begin at different blocks, so that they rarely compete for one.
        first = self._index * num_blocks // size
        self._order = [*range(first, num_blocks), *range(first)]

    def complete(self, number: int, call: str, source: int | None) -> None:
        self._peers.wait_for_calls(number, call)
        own = self._peers.own
        own.begin_blocks(number)
        for index in self._order:
            if self._claims.claim(self.turn, index):
                self._combine(index, source)
        own.end_blocks()
        self._peers.wait_for_all(lambda peer: peer.active_call != number, call, "did not finish their blocks")

    def _combine(self, index: int, source: int | None) -> None:
        block = self._blocks[index]
        if source is None:
            add_up(block, block[0])
        copy_to_all(block, source or 0)


class BridgedBuffer(SharedBuffer):
    """A buffer in a world with several hosts.

    Nothing is double-buffered: a worker does not touch its part between its call and the result, and the leader touches
    the parts only between the last call and the result.
    """

    def __init__(self, peers: LocalPeers, name: str, parts: Sequence[torch.Tensor], num_hosts: int) -> None:
        super().__init__(peers, name, parts)
        split = num_hosts * PIECE_BYTES // self.tensor.itemsize
        self.pieces = [Piece(sections) for sections in zip(*(part.split(split) for part in parts), strict=True)]

    def complete(self, number: int, call: str, source: int | None) -> None:
        self._peers.wait_for_leader(number, call)


class Piece:
    """The same section of a buffer on all workers of a host. `tensor` is the leader's."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.tensor = parts[0]
        self._blocks = list(zip(*(part.split(_SINGLE_THREAD_NUMEL) for part in parts), strict=True))

    def reduce(self) -> None:
        """Sum all parts into the leader's, in rank order."""
        for first, *others in self._blocks:
            for other in others:
                first.add_(other)

    def take(self, index: int) -> None:
        """Copy one worker's part into the leader's."""
        for block in self._blocks if index else ():
            block[0].copy_(block[index])

    def distribute(self) -> None:
        """Copy the leader's part into all others."""
        for block in self._blocks:
            copy_to_all(block, 0)


def allocate(peers: LocalPeers, numel: int, dtype: torch.dtype) -> tuple[int, list[torch.Tensor]]:
    """The offset of new memory in the segments of all workers, and a tensor over it in each of them."""
    offset = peers.own.allocate(numel * dtype.itemsize)
    return offset, [segment.tensor(numel, dtype, offset) for segment in peers.segments]


def add_up(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Sum in rank order, so that the bits do not depend on the worker that sums. `out` may be the first part."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def add_others(parts: Sequence[torch.Tensor], target: int) -> None:
    """Add all other parts to one of them, in rank order."""
    for index, part in enumerate(parts):
        if index != target:
            parts[target].add_(part)


def copy_to_all(parts: Sequence[torch.Tensor], source: int) -> None:
    for index, part in enumerate(parts):
        if index != source:
            part.copy_(parts[source])


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
