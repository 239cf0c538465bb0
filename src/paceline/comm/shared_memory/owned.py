"""Buffers in shared memory that have an owner: the others add to its memory, and read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.comm.base import OwnedBuffer, Ownership, Pending
from paceline.comm.owned_tensors import Received
from paceline.comm.shared_memory.buffers import BridgedBuffer, SharedBuffer, SumBuffer, aligned
from paceline.comm.shared_memory.peers import LocalPeers

if TYPE_CHECKING:
    from paceline.comm.shared_memory.communicator import SharedMemoryCommunicator


def owned_buffers(
    communicator: SharedMemoryCommunicator, peers: LocalPeers, ownership: Ownership, num_hosts: int
) -> list[OwnedBuffer]:
    """See `Communicator.owned`. Raises OSError if there is not enough memory."""
    dtype = ownership.dtype
    sizes = [aligned(max(numel, 1) * dtype.itemsize) for numel in ownership.numels]
    room = max(sizes)
    slots = peers.own.allocate(ownership.num_slots * room)
    held = [
        sum(size for size, ranks in zip(sizes, ownership.holders, strict=True) if rank in ranks) for rank in peers.ranks
    ]
    homes = peers.own.allocate(held[peers.segments.index(peers.own)], max(held))
    # By worker of this host: where its next buffer begins, and how many slots were used.
    ends, turns = [homes] * len(held), [0] * len(held)
    buffers: list[OwnedBuffer] = []
    for number, (numel, size, holders) in enumerate(zip(ownership.numels, sizes, ownership.holders, strict=True)):
        parts, totals = [], {}
        for index, (rank, segment) in enumerate(zip(peers.ranks, peers.segments, strict=True)):
            if rank in holders:
                totals[rank] = segment.tensor(max(numel, 1), dtype, ends[index])
                ends[index] += size
            if rank == holders[0]:
                parts.append(totals[rank])
            else:
                parts.append(segment.tensor(max(numel, 1), dtype, slots + turns[index] % ownership.num_slots * room))
                turns[index] += 1
        name = f"{numel} elements of {dtype} (number {number} with an owner, from offset {slots})"
        buffer: SharedBuffer
        if num_hosts > 1:
            buffer = BridgedBuffer(peers, name, parts, num_hosts)
        else:
            buffer = SumBuffer(peers, name, parts, holders[0], [totals[rank] for rank in holders[1:]])
        total = totals.get(peers.world.rank)
        buffers.append(_OwnedBuffer(communicator, peers, buffer, numel, holders, total, num_hosts))
    return buffers


class _OwnedBuffer:
    def __init__(
        self,
        communicator: SharedMemoryCommunicator,
        peers: LocalPeers,
        buffer: SharedBuffer,
        numel: int,
        holders: Sequence[int],
        total: torch.Tensor | None,
        num_hosts: int,
    ) -> None:
        self._communicator = communicator
        self._peers = peers
        self._buffer = buffer
        self._owner = holders[0]
        self._num_hosts = num_hosts
        self._delivered: dict[torch.dtype, BridgedBuffer] = {}
        self.tensor = buffer.tensor[:numel]
        self.total = None if total is None else total[:numel]

    def reduce(self) -> Pending:
        pending = self._communicator.start(self._buffer, f"reduce to {self._owner}", None)
        if self._num_hosts == 1 or self.total is None or self._owner == self._peers.world.rank:
            return pending
        return Received(pending, self.tensor, self.total.copy_)

    def deliver(self, dtype: torch.dtype, receive: Callable[[torch.Tensor], object]) -> Pending:
        numel, owner, call = self.tensor.numel(), self._owner, f"delivery from {self._owner}"
        if self._num_hosts == 1:
            memory = self._buffer.parts[owner].view(dtype)[:numel]
            return self._communicator.start(self._buffer, call, owner, lambda: receive(memory))
        if dtype not in self._delivered:
            parts = [part.view(dtype)[: max(numel, 1)] for part in self._buffer.parts]
            name = f"{self._buffer.name}, as {dtype}"
            self._delivered[dtype] = BridgedBuffer(self._peers, name, parts, self._num_hosts)
        buffer = self._delivered[dtype]
        pending = self._communicator.start(buffer, call, owner)
        return pending if owner == self._peers.world.rank else Received(pending, buffer.tensor[:numel], receive)
