"""Buffers in shared memory that have an owner: the others add to its memory, and read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.comm.base import OwnedBuffer, Ownership, Pending
from paceline.comm.owned_tensors import Received
from paceline.comm.shared_memory.buffers import BridgedBuffer, LargeBuffer, add_others, aligned
from paceline.comm.shared_memory.peers import LocalPeers

if TYPE_CHECKING:
    from paceline.comm.shared_memory.communicator import SharedMemoryCommunicator


def owned_buffers(communicator: SharedMemoryCommunicator, peers: LocalPeers, ownership: Ownership) -> list[OwnedBuffer]:
    """See `Communicator.owned`. Raises OSError if there is not enough memory."""
    dtype, num_slots = ownership.dtype, ownership.num_slots
    buffers = [*zip(ownership.numels, ownership.holders, strict=True)]
    sizes = [aligned(numel * dtype.itemsize) for numel in ownership.numels]
    slots = peers.own.allocate(num_slots * max(sizes))
    held = [sum(size for size, (_, holders) in zip(sizes, buffers, strict=True) if r in holders) for r in peers.ranks]
    totals_at = peers.own.allocate(held[peers.segments.index(peers.own)], max(held))
    ends, turns = [totals_at] * len(held), [0] * len(held)  # of totals and slots that a worker has so far
    made: list[OwnedBuffer] = []
    for number, (numel, holders) in enumerate(buffers):
        parts: list[torch.Tensor] = []
        totals: dict[int, torch.Tensor] = {}
        for index, (rank, segment) in enumerate(zip(peers.ranks, peers.segments, strict=True)):
            if rank in holders:
                totals[rank] = segment.tensor(numel, dtype, ends[index])
                ends[index] += sizes[number]
            if rank == holders[0]:
                parts.append(totals[rank])
            else:
                parts.append(segment.tensor(numel, dtype, slots + turns[index] % num_slots * max(sizes)))
                turns[index] += 1
        name = f"{numel} elements of {dtype} (number {number} with an owner, from offset {slots})"
        kind = _Owned if communicator.num_hosts == 1 else _OwnedAmongHosts
        made.append(kind(peers, name, parts, _Role(communicator, holders[0], totals)))
    return made


class _Role(NamedTuple):
    """totals: the memory of the sum, by rank, of its holders."""

    communicator: SharedMemoryCommunicator
    owner: int
    totals: Mapping[int, torch.Tensor]


class _Owned(LargeBuffer):
    """The sum goes to the owner's part."""

    def __init__(self, peers: LocalPeers, name: str, parts: Sequence[torch.Tensor], role: _Role) -> None:
        super().__init__(peers, name, parts)
        self._communicator, self._owner, totals = role
        self.total = totals.get(peers.world.rank)
        self._copies = [total.split(self._block_numel) for rank, total in totals.items() if rank != self._owner]

    def reduce(self) -> Pending:
        return self._communicator.start(self, f"reduce to {self._owner}", None)

    def deliver(self, dtype: torch.dtype, receive: Callable[[torch.Tensor], object]) -> Pending:
        memory = self.parts[self._owner].view(dtype)[: self.tensor.numel()]
        return self._communicator.start(self, f"delivery from {self._owner}", self._owner, lambda: receive(memory))

    def _combine(self, index: int, source: int | None) -> None:
        block = self._blocks[index]
        add_others(block, self._owner)
        for copy in self._copies:
            copy[index].copy_(block[self._owner])


class _OwnedAmongHosts(BridgedBuffer):
    """All workers get the sum, and all get what the owner delivers."""

    def __init__(self, peers: LocalPeers, name: str, parts: Sequence[torch.Tensor], role: _Role) -> None:
        super().__init__(peers, name, parts, role.communicator.num_hosts)
        self._communicator, self._owner, totals = role
        self.total = totals.get(peers.world.rank)
        self._delivered: dict[torch.dtype, BridgedBuffer] = {}

    def reduce(self) -> Pending:
        pending = self._communicator.start(self, f"reduce to {self._owner}", None)
        if self.total is None or self._owner == self._peers.world.rank:
            return pending
        return Received(pending, self.tensor, self.total.copy_)

    def deliver(self, dtype: torch.dtype, receive: Callable[[torch.Tensor], object]) -> Pending:
        if dtype not in self._delivered:
            parts = [part.view(dtype)[: part.numel()] for part in self.parts]
            name = f"{self.name}, as {dtype}"
            self._delivered[dtype] = BridgedBuffer(self._peers, name, parts, self._communicator.num_hosts)
        buffer = self._delivered[dtype]
        pending = self._communicator.start(buffer, f"delivery from {self._owner}", self._owner)
        return pending if self._owner == self._peers.world.rank else Received(pending, buffer.tensor, receive)
