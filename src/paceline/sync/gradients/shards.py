"""Exchanges for a model that is divided among the workers: gradients go to the holders of a piece, new weights to all.

The owner of a bucket has memory for it, in which gradients are summed. After the update it has the new weights, which
the other workers copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from paceline.comm.base import Communicator, OwnedBuffer, Ownership, Pending
from paceline.core.errors import MisuseError
from paceline.plan.memory import NUM_SLOTS
from paceline.plan.sharding import Chunk, Piece
from paceline.sync.gradients.division import Division, flat
from paceline.sync.gradients.layout import BucketLayout


class Bucket:
    """The trained pieces of a chunk: what is exchanged together.

    layout: of the pieces, whose `slice` counts parameters in the order of `Shards.trained`. memory: see
    `Shards.allocate`.
    """

    memory: OwnedBuffer

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
    """The trained pieces of a model in buckets."""

    def __init__(self, communicator: Communicator, division: Division) -> None:
        self.communicator = communicator
        self.division = division
        self.buckets: list[Bucket] = []
        self.trained: dict[str, torch.Tensor] = {}  # in the order of the buckets
        self.used: set[int] = set()  # the parameters, by id, that have a mean gradient in this step
        self._owned: list[tuple[Ownership, list[OwnedBuffer]]] = []  # on CPUs: all that was allocated for this division

    def divide_again(self, division: Division) -> None:
        """The workers have changed. `train` follows."""
        self.division = division
        self._owned = []

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
        self._addresses = [parameter.data_ptr() for parameter in self.trained.values()]

    def allocate(self, dtype_of: Callable[[BucketLayout], torch.dtype]) -> None:
        """Get memory for the sums of all buckets, of these dtypes. Called by all workers together, after `train`.

        A worker that does not own a bucket uses the same memory for it as for the one NUM_SLOTS such buckets later.
        """
        self._views: dict[int, list[torch.Tensor]] = {}  # of the pieces, in the memory of their owner
        by_dtype: dict[torch.dtype, list[Bucket]] = {}
        for bucket in self.buckets:
            by_dtype.setdefault(dtype_of(bucket.layout), []).append(bucket)
        for dtype, buckets in by_dtype.items():
            numels = [bucket.layout.numel for bucket in buckets]
            holders = [bucket.holders for bucket in buckets]
            ownership = Ownership(numels, holders, dtype, self.communicator.world.device, NUM_SLOTS)
            # An earlier set of parameters leaves some: shared memory is not freed during a run.
            memories = next((made for known, made in self._owned if known == ownership), None)
            if memories is None:
                memories = self.communicator.owned(ownership)
                if ownership.device.type == "cpu":
                    self._owned.append((ownership, memories))
            for bucket, memory in zip(buckets, memories, strict=True):
                bucket.memory = memory

    def gather_weights(self) -> None:
        """Send every owner's updated pieces to all others. Called by all workers together."""
        self._check_memory()
        own: list[Pending] = []
        others: list[Pending] = []
        for bucket in self.buckets:
            dtype = bucket.layout.dtype
            if bucket.owner == self.communicator.world.rank:
                memory = bucket.memory.tensor.view(dtype)
                torch._foreach_copy_(self._views_of(bucket, memory), bucket.layout.parameters)
                own.append(bucket.memory.deliver(dtype, partial(self._receive, bucket)))
                continue
            if len(others) == NUM_SLOTS:
                others.pop(0).wait()
            others.append(bucket.memory.deliver(dtype, partial(self._receive, bucket)))
        for pending in (*others, *own):
            pending.wait()

    @torch.no_grad()
    def _receive(self, bucket: Bucket, memory: torch.Tensor) -> None:
        torch._foreach_copy_(bucket.layout.parameters, self._views_of(bucket, memory))

    def _views_of(self, bucket: Bucket, memory: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of a bucket in its memory, which is the same in every step."""
        if bucket.number not in self._views:
            self._views[bucket.number] = bucket.layout.views(memory)
        return self._views[bucket.number]

    def _check_memory(self) -> None:
        """Raise if a parameter's memory was replaced: the pieces are views of it."""
        for (name, parameter), address in zip(self.trained.items(), self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise MisuseError(
                    f"the memory of parameter {name!r} was replaced after the set-up (parameter.data = ..., or "
                    "model.to(...)), while its optimizer's state is divided among the workers: copy into it instead, "
                    "parameter.data.copy_(...)"
                )
