"""The weighted sum of all workers' values, exchanged in few bytes and bitwise equal on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.comm.base import Communicator, Pending
from paceline.sync.compression.codec import CODECS, SUMMED, Codec
from paceline.sync.compression.settings import Compression


class WeightedSum(Protocol):
    """One exchange at a time: `start` on all workers, then `finish`. After a failed one, `start` may follow again."""

    keeps_residual: bool

    def start(
        self,
        values: torch.Tensor,
        weight: float,
        seed: int,
        residual: torch.Tensor | None = None,
        message: Sequence[float] = (),
    ) -> None:
        """Send flat float32 values. seed: of the rounding. residual: what earlier exchanges did not send; it is added.

        The values may be overwritten until `finish` returns. Weights should be near 1, so that a sum in fp16 does not
        overflow. message: travels with the values.
        """

    def messages(self) -> list[list[float]]:
        """Wait for the others and return their messages, by rank. Called before `finish`."""

    def finish(self, weights: Sequence[float], scale: float = 1.0) -> torch.Tensor:
        """Wait for the others and return the sum times `scale`, in the memory of the values. Updates the residual.

        weights: of all workers, by rank.
        """


def weighted_sum(
    compression: Compression, numel: int, communicator: Communicator, message_length: int = 0
) -> WeightedSum:
    """For at most `numel` values in an exchange. All workers call this together."""
    if compression in SUMMED:
        return Summed(numel, SUMMED[compression], communicator, message_length)
    return Packed(numel, CODECS[compression](), communicator, message_length)


class Summed:
    """Values that the communicator adds up: fp32, bf16 or fp16."""

    keeps_residual = False

    def __init__(self, numel: int, dtype: torch.dtype, communicator: Communicator, message_length: int) -> None:
        self._communicator = communicator
        world = communicator.world
        self._sent = communicator.empty(numel, dtype, world.device)
        messages = communicator.empty(world.size * message_length, torch.float64, world.device)
        self._messages = messages.view(world.size, message_length)

    def start(
        self,
        values: torch.Tensor,
        weight: float,
        seed: int,
        residual: torch.Tensor | None = None,
        message: Sequence[float] = (),
    ) -> None:
        self._values = values
        torch.mul(values, weight, out=self._sent[: len(values)])
        self._sent[len(values) :].zero_()
        self._pending = [self._communicator.all_reduce(self._sent)]
        if message:
            self._messages.zero_()
            self._messages[self._communicator.world.rank] = torch.tensor(message, dtype=torch.float64)
            self._pending.append(self._communicator.all_reduce(self._messages))

    def messages(self) -> list[list[float]]:
        self._wait()
        return self._messages.tolist()

    def finish(self, weights: Sequence[float], scale: float = 1.0) -> torch.Tensor:
        self._wait()
        values = self._values
        del self._values
        return values.copy_(self._sent[: len(values)]).mul_(scale)

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending = []


class Packed:
    """Encoded values, which every worker gets from all others, decodes and adds up in rank order."""

    def __init__(self, numel: int, codec: Codec, communicator: Communicator, message_length: int) -> None:
        self._codec = codec
        self._communicator = communicator
        self.keeps_residual = codec.keeps_residual
        world = communicator.world
        # By rank. Each is broadcast by its worker: together that is an all-gather, on every kind of communicator.
        self._message_bytes = message_length * torch.float64.itemsize
        num_bytes = self._message_bytes + codec.num_bytes(numel)
        self._rows = [communicator.empty(num_bytes, torch.uint8, world.device) for _ in range(world.size)]

    def start(
        self,
        values: torch.Tensor,
        weight: float,
        seed: int,
        residual: torch.Tensor | None = None,
        message: Sequence[float] = (),
    ) -> None:
        self._values = values if residual is None else values + residual
        self._residual = residual
        own = self._rows[self._communicator.world.rank]
        own[: self._message_bytes].view(torch.float64).copy_(torch.tensor(message, dtype=torch.float64))
        self._codec.encode(self._values, seed, self._packed(own))
        self._pending: list[Pending] = [
            self._communicator.broadcast(row, source) for source, row in enumerate(self._rows)
        ]

    def messages(self) -> list[list[float]]:
        self._wait()
        return [row[: self._message_bytes].view(torch.float64).tolist() for row in self._rows]

    def finish(self, weights: Sequence[float], scale: float = 1.0) -> torch.Tensor:
        self._wait()
        if self._residual is not None:
            # Only after all have arrived: an exchange that fails has sent nothing.
            self._residual.copy_(self._values)
            self._codec.add_decoded(self._packed(self._rows[self._communicator.world.rank]), -1.0, self._residual)
        total = self._values.zero_()
        for row, weight in zip(self._rows, weights, strict=True):
            self._codec.add_decoded(self._packed(row), weight * scale, total)
        del self._values
        return total

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending = []

    def _packed(self, row: torch.Tensor) -> torch.Tensor:
        return row[self._message_bytes :][: self._codec.num_bytes(len(self._values))]
