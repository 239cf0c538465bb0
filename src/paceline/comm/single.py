"""A world of one: nothing to exchange."""

from __future__ import annotations

import torch

from paceline.comm.base import DEFAULT_TIMEOUT_S, DONE, Pending
from paceline.core.world import World


class SingleCommunicator:
    """Every exchange is complete before it starts."""

    def __init__(self, world: World, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if world.size != 1:
            raise ValueError(f"a world of {world.size} workers needs a communicator that reaches them")
        self.world = world
        self.timeout_s = timeout_s

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return DONE

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        return DONE

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        return
