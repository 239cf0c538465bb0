"""Owned buffers over the collectives of a communicator, for workers that share no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.comm.base import Communicator, OwnedBuffer, Ownership, Pending


@dataclass(frozen=True)
class OwnedTensor:
    """sum_to: sums a tensor to one rank. If several ranks hold the sum, it is all-reduced instead."""

    communicator: Communicator
    tensor: torch.Tensor
    total: torch.Tensor | None
    holders: Sequence[int]
    sum_to: Callable[[torch.Tensor, int], Pending]

    def reduce(self) -> Pending:
        if len(self.holders) == 1:
            return self.sum_to(self.tensor, self.holders[0])
        pending = self.communicator.all_reduce(self.tensor)
        if self.total is None or self.total is self.tensor:
            return pending
        return Received(pending, self.tensor, self.total.copy_)

    def deliver(self, dtype: torch.dtype, receive: Callable[[torch.Tensor], object]) -> Pending:
        tensor = self.tensor.view(dtype)[: self.tensor.numel()]
        pending = self.communicator.broadcast(tensor, self.holders[0])
        is_owner = self.holders[0] == self.communicator.world.rank
        return pending if is_owner else Received(pending, tensor, receive)


@dataclass(frozen=True)
class Received:
    """A `Pending` that passes the received tensor on."""

    pending: Pending
    tensor: torch.Tensor
    receive: Callable[[torch.Tensor], object]

    def wait(self) -> None:
        self.pending.wait()
        self.receive(self.tensor)


def owned_tensors(
    communicator: Communicator, ownership: Ownership, reduce: Callable[[torch.Tensor, int], Pending]
) -> list[OwnedBuffer]:
    """See `Communicator.owned`."""

    def zeros(numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=ownership.dtype, device=ownership.device)

    rank = communicator.world.rank
    num_others = sum(ranks[0] != rank for ranks in ownership.holders)
    slots = [zeros(max(ownership.numels)) for _ in range(min(ownership.num_slots, num_others))]
    buffers: list[OwnedBuffer] = []
    turn = 0
    for numel, ranks in zip(ownership.numels, ownership.holders, strict=True):
        tensor = total = zeros(numel) if rank in ranks else None
        if tensor is None or rank != ranks[0]:
            tensor, turn = slots[turn % len(slots)][:numel], turn + 1
        buffers.append(OwnedTensor(communicator, tensor, total, ranks, reduce))
    return buffers
