"""The weighted sum of all workers' values, exchanged in few bytes and equal to the bit on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.comm.base import Communicator, Pending
from paceline.sync.compression.codec import Codec, codec_for, summed_dtype
from paceline.sync.compression.names import Compression


class WeightedSum(Protocol):
    """One exchange at a time: `start` on all workers, then `finish`. After a failed one, `start` may follow again."""

    keeps_residual: bool

    def start(self, values: torch.Tensor, weight: float, seed: int, residual: torch.Tensor | None = None) -> None:
        """Send flat float32 values. seed: of the rounding. residual: what earlier exchanges have left, which is added.

        Weights should be near 1, so that a sum in fp16 does not overflow.
        """

    def finish(self, weights: Sequence[float]) -> torch.Tensor:
        """Wait for the others and return the sum. weights: of all workers, by rank. Updates the residual in place."""


def weighted_sum(compression: Compression, numel: int, communicator: Communicator) -> WeightedSum:
    """For at most `numel` values in an exchange. All workers call this together."""
    codec = codec_for(compression)
    if codec is None:
        return Summed(numel, summed_dtype(compression), communicator)
    return Packed(numel, codec, communicator)


class Summed:
    """Values that the communicator adds up: fp32, bf16 or fp16."""

    keeps_residual = False

    def __init__(self, numel: int, dtype: torch.dtype, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sent = communicator.empty(numel, dtype, communicator.world.device)

    def start(self, values: torch.Tensor, weight: float, seed: int, residual: torch.Tensor | None = None) -> None:
        self._numel = values.numel()
        torch.mul(values, weight, out=self._sent[: self._numel])
        self._sent[self._numel :].zero_()
        self._pending = self._communicator.all_reduce(self._sent)

    def finish(self, weights: Sequence[float]) -> torch.Tensor:
        self._pending.wait()
        return self._sent[: self._numel].to(torch.float32, copy=True)


class Packed:
    """Encoded values, which every worker gets from all others, decodes and adds up in rank order."""

    def __init__(self, numel: int, codec: Codec, communicator: Communicator) -> None:
        self._codec = codec
        self._communicator = communicator
        self.keeps_residual = codec.keeps_residual
        world = communicator.world
        # By rank. Each is broadcast by its worker: together that is an all-gather, on every kind of communicator.
        num_bytes = codec.num_bytes(numel)
        self._rows = [communicator.empty(num_bytes, torch.uint8, world.device) for _ in range(world.size)]

    def start(self, values: torch.Tensor, weight: float, seed: int, residual: torch.Tensor | None = None) -> None:
        rank = self._communicator.world.rank
        wanted = values if residual is None else values + residual
        own = self._rows[rank]
        packed = self._codec.encode(wanted, seed)
        own[: len(packed)] = packed
        self._residual, self._wanted = residual, wanted
        self._pending: list[Pending] = [
            self._communicator.broadcast(row, source) for source, row in enumerate(self._rows)
        ]

    def finish(self, weights: Sequence[float]) -> torch.Tensor:
        for pending in self._pending:
            pending.wait()
        numel, rank = self._wanted.numel(), self._communicator.world.rank
        num_bytes = self._codec.num_bytes(numel)
        total = torch.zeros_like(self._wanted)
        for source, (row, weight) in enumerate(zip(self._rows, weights, strict=True)):
            values = self._codec.decode(row[:num_bytes], numel)
            if source == rank and self._residual is not None:
                # Not before all have arrived: an exchange that fails has sent nothing.
                torch.sub(self._wanted, values, out=self._residual)
            total.add_(values, alpha=weight)
        del self._wanted
        return total
