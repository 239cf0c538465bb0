"""Owned buffers over the collectives of a communicator, for workers that share no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.comm.base import Communicator, OwnedBuffer, Ownership, Pending


class OwnedTensor:
    """reduce: sums a tensor to one rank. If several ranks hold the sum, it is all-reduced instead."""

    def __init__(
        self,
        communicator: Communicator,
        tensor: torch.Tensor,
        total: torch.Tensor | None,
        holders: Sequence[int],
        reduce: Callable[[torch.Tensor, int], Pending],
    ) -> None:
        self._communicator = communicator
        self.tensor = tensor
        self.total = total
        self._holders = holders
        self._reduce = reduce

    def reduce(self) -> Pending:
        if len(self._holders) == 1:
            return self._reduce(self.tensor, self._holders[0])
        pending = self._communicator.all_reduce(self.tensor)
        if self.total is None or self.total is self.tensor:
            return pending
        return Received(pending, self.tensor, self.total.copy_)

    def deliver(self, dtype: torch.dtype, receive: Callable[[torch.Tensor], object]) -> Pending:
        tensor = self.tensor.view(dtype)[: self.tensor.numel()]
        pending = self._communicator.broadcast(tensor, self._holders[0])
        is_owner = self._holders[0] == self._communicator.world.rank
        return pending if is_owner else Received(pending, tensor, receive)


class Received:
    """A `Pending` that passes the received tensor on."""

    def __init__(self, pending: Pending, tensor: torch.Tensor, receive: Callable[[torch.Tensor], object]) -> None:
        self._pending = pending
        self._tensor = tensor
        self._receive: Callable[[torch.Tensor], object] = receive

    def wait(self) -> None:
        self._pending.wait()
        self._receive(self._tensor)


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
