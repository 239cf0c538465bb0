"""The division of a model among workers: each one owns pieces of the parameters, which it alone updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from paceline.comm.base import Communicator, Pending
from paceline.core.errors import MisuseError
from paceline.plan.memory import CHUNK_NUMEL, GPU_CHUNK_NUMEL, NUM_SLOTS, chunk_numel
from paceline.plan.sharding import Chunk, Piece, Size, cut
from paceline.sync.gradients.layout import BucketLayout, memory_order


class Bucket:
    """The trained pieces of a chunk: what is exchanged together.

    layout: of the pieces, whose `slice` counts parameters in the order of `Shards.trained`.
    """

    def __init__(self, number: int, owner: int, layout: BucketLayout, pieces: Sequence[Piece]) -> None:
        self.number = number
        self.owner = owner
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
    """Who owns which piece of which parameter, and the memory to exchange them in.

    weights: by rank, the relative sizes of what workers own. whole: the parameters that must not be cut, by id. A
    parameter is divided when it is first trained, and keeps its owners.
    """

    def __init__(self, communicator: Communicator, weights: Sequence[float], *, has_masters: bool = False) -> None:
        self.communicator = communicator
        self.weights = tuple(weights)
        self._has_masters = has_masters
        self.whole: set[int] = set()
        self.buckets: list[Bucket] = []
        self.trained: dict[str, torch.Tensor] = {}  # in the order of the buckets
        self.used: set[int] = set()  # the parameters, by id, that have a mean gradient in this step
        self._parameters: list[torch.Tensor] = []
        self._number_of: dict[int, int] = {}
        self._chunks: list[Chunk] = []
        self._tensors: dict[Piece, torch.Tensor] = {}
        self._slots: dict[torch.dtype, list[torch.Tensor]] = {}
        self._own_of: dict[int, list[torch.Tensor]] = {}
        self._start_of: dict[int, int] = {}
        self._masters: dict[int, torch.Tensor] = {}

    @cached_property
    def _chunk_numel(self) -> int:
        return GPU_CHUNK_NUMEL if self.communicator.world.device.type == "cuda" else CHUNK_NUMEL

    @property
    def chunks(self) -> Sequence[Chunk]:
        return self._chunks

    def cover(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Divide those of the parameters that are not divided yet. All workers make the same calls."""
        new = {name: p for name, p in reversed([*parameters.items()]) if id(p) not in self._number_of}
        if not new:
            return
        for name, parameter in new.items():
            if not is_dense(parameter):
                raise MisuseError(
                    f"parameter {name!r} has gaps or overlaps in memory (strides {parameter.stride()}), so it cannot "
                    "be divided among the workers: make it contiguous, or leave shard= out"
                )
        first, world = len(self._parameters), self.communicator.world
        sizes = [Size(p.numel(), p.dtype, id(p) in self.whole) for p in new.values()]
        at_most = chunk_numel(sum(size.numel for size in sizes), world.size, self._chunk_numel)
        chunks = cut(sizes, self.weights, at_most, loads=self.loads, first=first)
        self._parameters += new.values()
        self._number_of |= {id(p): number for number, p in enumerate(new.values(), first)}
        self._chunks += chunks
        for chunk in chunks:
            for piece in chunk.pieces:
                parameter = self._parameters[piece.parameter]
                tensor = parameter.detach()
                if id(parameter) not in self.whole:
                    tensor = flat(tensor)[piece.start : piece.stop]
                self._tensors[piece] = tensor
                if chunk.owner == world.rank:
                    if self.update_dtype(tensor.dtype) != tensor.dtype:
                        self._masters[id(tensor)] = tensor.to(self.update_dtype(tensor.dtype))
                    own = self.updated(tensor)
                    self._own_of.setdefault(id(parameter), []).append(own)
                    self._start_of[id(own)] = piece.start

    @property
    def loads(self) -> list[int]:
        """The number of elements that each worker owns, by rank."""
        loads = [0] * len(self.weights)
        for chunk in self._chunks:
            loads[chunk.owner] += chunk.numel
        return loads

    def own_pieces(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """What this worker updates of a parameter: views of it, or masters of higher precision."""
        return self._own_of.get(id(parameter), [])

    def start_of(self, own: torch.Tensor) -> int:
        """Where a piece of `own_pieces` begins in its parameter."""
        return self._start_of[id(own)]

    def updated(self, view: torch.Tensor) -> torch.Tensor:
        """What the owner updates of a piece: its master if it has one, else the view of the parameter itself."""
        return self._masters.get(id(view), view)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which pieces of parameters are updated."""
        return torch.float32 if self._has_masters and dtype in (torch.bfloat16, torch.float16) else dtype

    @torch.no_grad()
    def copy_masters(self, *, to_weights: bool) -> None:
        """Round the masters to the weights after an update, or make them anew from weights that were loaded."""
        views = [view for view in self._tensors.values() if id(view) in self._masters]
        masters = [self._masters[id(view)] for view in views]
        if views:
            torch._foreach_copy_(*((views, masters) if to_weights else (masters, views)))

    def tensor(self, piece: Piece) -> torch.Tensor:
        return self._tensors[piece]

    def parameter(self, piece: Piece) -> torch.Tensor:
        return self._parameters[piece.parameter]

    def train(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the parameters that are trained from now on."""
        self.cover(parameters)
        names = {id(p): name for name, p in parameters.items()}
        self.buckets, self.trained = [], {}
        index_of: dict[str, int] = {}
        for chunk in self._chunks:
            pieces = {names[id(p)]: each for each in chunk.pieces if id(p := self.parameter(each)) in names}
            if not pieces:
                continue
            for name in pieces:
                index_of.setdefault(name, len(index_of))
                self.trained[name] = parameters[name]
            layout = BucketLayout(
                {name: self._tensors[piece] for name, piece in pieces.items()}, index_of[next(iter(pieces))]
            )
            self.buckets.append(Bucket(len(self.buckets), chunk.owner, layout, list(pieces.values())))
        self._views: dict[int, list[torch.Tensor]] = {}  # of the pieces, in the memory of their exchange
        self._addresses = [parameter.data_ptr() for parameter in self.trained.values()]

    def slot(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        """The memory in which a bucket is exchanged in this dtype. NUM_SLOTS buckets later it is used again."""
        if dtype not in self._slots or self._slots[dtype][0].numel() < self._slot_numel:
            device = self.communicator.world.device
            self._slots[dtype] = [
                self.communicator.empty(self._slot_numel, dtype, device).zero_() for _ in range(NUM_SLOTS)
            ]
        return self._slots[dtype][bucket.number % NUM_SLOTS][: bucket.layout.numel]

    @property
    def _slot_numel(self) -> int:
        return max(bucket.layout.numel for bucket in self.buckets)

    def gather_weights(self) -> None:
        """Send every worker's updated pieces to all others. Called by all workers together."""
        self._check_memory()
        in_flight: list[tuple[Bucket, torch.Tensor, Pending]] = []
        for bucket in self.buckets:
            if len(in_flight) == NUM_SLOTS:
                self._receive(*in_flight.pop(0))
            slot = self.slot(bucket, bucket.layout.dtype)
            if bucket.owner == self.communicator.world.rank:
                torch._foreach_copy_(self._views_of(bucket, slot), bucket.layout.parameters)
            in_flight.append((bucket, slot, self.communicator.broadcast(slot, bucket.owner)))
        for each in in_flight:
            self._receive(*each)

    def _receive(self, bucket: Bucket, slot: torch.Tensor, pending: Pending) -> None:
        pending.wait()
        if bucket.owner != self.communicator.world.rank:
            torch._foreach_copy_(bucket.layout.parameters, self._views_of(bucket, slot))

    def _views_of(self, bucket: Bucket, slot: torch.Tensor) -> list[torch.Tensor]:
        if bucket.number not in self._views:
            self._views[bucket.number] = bucket.layout.views(slot)
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


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory, each place once."""
    expected = 1
    for stride, size in sorted(memory_order(tensor)):
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def flat(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """The elements in the order of the memory of `like` (default: of the tensor itself), without a copy if possible."""
    if like is not None and memory_order(tensor) != memory_order(like):
        tensor = torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
