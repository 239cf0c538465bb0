"""A world of one worker: every exchange is a no-op."""

from __future__ import annotations

import torch

from paceline.comm.base import DEFAULT_TIMEOUT_S, DONE, OwnedBuffer, Ownership, Pending
from paceline.comm.owned_tensors import owned_tensors
from paceline.core.world import World


class SingleCommunicator:
    """The communicator of a world of size 1."""

    def __init__(self, world: World, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if world.size != 1:
            raise ValueError(f"SingleCommunicator serves a world of 1 worker, not {world.size}: use comm.connect")
        self.world = world
        self.timeout_s = timeout_s

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return DONE

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        return DONE

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def owned(self, ownership: Ownership) -> list[OwnedBuffer]:
        return owned_tensors(self, ownership, lambda *_: DONE)

    def abort(self) -> None:
        return

    def close(self) -> None:
        return
