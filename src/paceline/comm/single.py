"""A world of one worker: every exchange is a no-op."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.comm.base import DEFAULT_TIMEOUT_S, DONE, Pending
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

    def reduce(self, tensor: torch.Tensor, target: int) -> Pending:
        return DONE

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        return DONE

    def deliver(self, tensor: torch.Tensor, source: int, receive: Callable[[torch.Tensor], object]) -> Pending:
        return DONE

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def abort(self) -> None:
        return

    def close(self) -> None:
        return
