"""Exchanges where a model is divided among the workers: gradients go to those who hold a piece, new weights to all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from paceline.comm.base import Communicator, Pending
from paceline.core.errors import MisuseError
from paceline.plan.memory import NUM_SLOTS
from paceline.plan.sharding import Chunk, Piece
from paceline.sync.gradients.division import Division, flat
from paceline.sync.gradients.layout import BucketLayout


class Bucket:
    """The trained pieces of a chunk: what is exchanged together.

    layout: of the pieces, whose `slice` counts parameters in the order of `Shards.trained`.
    """

    def __init__(self, number: int, chunk: Chunk, layout: BucketLayout, pieces: Sequence[Piece]) -> None:
        self.number = number
        self.owner = chunk.owner
        self.holders = chunk.holders
        self.layout = layout
        self._ranges = [(piece.start, piece.stop) for piece in pieces]
        self._shapes = [tensor.shape for tensor in layout.parameters]

    def pieces_of(
        self, gradients: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The parts of these gradients, one per parameter of the bucket, that lie in the pieces."""
        return [
            None if gradient is None else flat(gradient, like=parameter)[start:stop].view(shape)
            for gradient, parameter, (start, stop), shape in zip(
                gradients, parameters, self._ranges, self._shapes, strict=True
            )
        ]


class Shards:
    """The trained pieces of a model in buckets, and the memory to exchange them in."""

    def __init__(self, communicator: Communicator, division: Division) -> None:
        self.communicator = communicator
        self.division = division
        self.buckets: list[Bucket] = []
        self.trained: dict[str, torch.Tensor] = {}  # in the order of the buckets
        self.used: set[int] = set()  # the parameters, by id, that have a mean gradient in this step
        self._slots: dict[torch.dtype, list[torch.Tensor]] = {}

    def divide_again(self, division: Division) -> None:
        """The workers have changed. `train` follows."""
        self.division = division
        self._slots.clear()  # in the memory of those before

    def train(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the parameters that are trained from now on."""
        self.division.cover(parameters)
        names = {id(p): name for name, p in parameters.items()}
        self.buckets, self.trained = [], {}
        index_of: dict[str, int] = {}
        division = self.division
        for chunk in division.chunks:
            pieces = {names[id(p)]: each for each in chunk.pieces if id(p := division.parameter(each)) in names}
            if not pieces:
                continue
            for name in pieces:
                index_of.setdefault(name, len(index_of))
                self.trained[name] = parameters[name]
            layout = BucketLayout(
                {name: division.tensor(piece) for name, piece in pieces.items()}, index_of[next(iter(pieces))]
            )
            self.buckets.append(Bucket(len(self.buckets), chunk, layout, list(pieces.values())))
        self._for_weights: dict[int, torch.Tensor] = {}
        self._views: dict[int, list[torch.Tensor]] = {}  # of the pieces, in the memory of their exchange
        self._addresses = [parameter.data_ptr() for parameter in self.trained.values()]

    def slot(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        """The memory in which the sums of a bucket, of this dtype, and later its weights are exchanged.

        NUM_SLOTS buckets later it is used again.
        """
        if dtype not in self._slots or self._slots[dtype][0].numel() < self._slot_numel:
            device = self.communicator.world.device
            self._slots[dtype] = [
                self.communicator.empty(self._slot_numel, dtype, device).zero_() for _ in range(NUM_SLOTS)
            ]
        memory = self._slots[dtype][bucket.number % NUM_SLOTS]
        self._for_weights[bucket.number] = memory.view(bucket.layout.dtype)[: bucket.layout.numel]
        return memory[: bucket.layout.numel]

    @property
    def _slot_numel(self) -> int:
        return max(bucket.layout.numel for bucket in self.buckets)

    def start_sum(self, bucket: Bucket, sums: torch.Tensor) -> Pending:
        """Add up a bucket over all workers, for those who hold it."""
        if len(bucket.holders) == 1:
            return self.communicator.reduce(sums, bucket.owner)
        return self.communicator.all_reduce(sums)

    def gather_weights(self) -> None:
        """Send every owner's updated pieces to all others. Called by all workers together."""
        self._check_memory()
        in_flight: list[Pending] = []
        for bucket in self.buckets:
            if len(in_flight) == NUM_SLOTS:
                in_flight.pop(0).wait()
            slot = self._for_weights[bucket.number]
            if bucket.owner == self.communicator.world.rank:
                torch._foreach_copy_(self._views_of(bucket, slot), bucket.layout.parameters)
            in_flight.append(self.communicator.deliver(slot, bucket.owner, partial(self._receive, bucket)))
        for pending in in_flight:
            pending.wait()

    @torch.no_grad()
    def _receive(self, bucket: Bucket, memory: torch.Tensor) -> None:
        torch._foreach_copy_(bucket.layout.parameters, self._views_of(bucket, memory))

    def _views_of(self, bucket: Bucket, memory: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of a bucket in the memory of its exchange, which is the same in every step."""
        if bucket.number not in self._views:
            self._views[bucket.number] = bucket.layout.views(memory)
        return self._views[bucket.number]

    def _check_memory(self) -> None:
        """The pieces are views of the parameters' memory."""
        for (name, parameter), address in zip(self.trained.items(), self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise MisuseError(
                    f"the memory of parameter {name!r} was replaced after the set-up (parameter.data = ..., or "
                    "model.to(...)), while its optimizer's state is divided among the workers: copy into it instead, "
                    "parameter.data.copy_(...)"
                )
