"""The division of a model among the workers of one world: each one holds pieces of the parameters, which it updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.core.errors import MisuseError
from paceline.core.world import World
from paceline.plan.memory import CHUNK_NUMEL, GPU_CHUNK_NUMEL, chunk_numel
from paceline.plan.sharding import Chunk, Piece, Size, cut
from paceline.sync.gradients.layout import memory_order


class Division:
    """Who holds which piece of which parameter.

    weights: by rank, the relative size of what a worker holds. copies: holders of each piece. has_masters: holders
    update float32 copies of half-precision weights. A parameter is divided when it is first trained, and keeps its
    holders.
    """

    def __init__(self, world: World, weights: Sequence[float], *, copies: int = 1, has_masters: bool = False) -> None:
        self._world = world
        self._weights = tuple(weights)
        self.whole: set[int] = set()  # the parameters that must not be cut, by id
        self.copies = copies
        self.has_masters = has_masters
        self.chunks: list[Chunk] = []
        self._parameters: list[torch.Tensor] = []
        self._number_of: dict[int, int] = {}
        self._tensors: dict[Piece, torch.Tensor] = {}
        self._own_of: dict[int, list[torch.Tensor]] = {}
        self._start_of: dict[int, int] = {}
        self._with_copies: set[int] = set()  # own pieces whose owner is another worker, by id
        self._view_of: dict[int, torch.Tensor] = {}
        self._masters: dict[int, torch.Tensor] = {}

    def cover(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Divide the parameters that are not divided yet. All workers make the same calls."""
        new = {name: p for name, p in reversed([*parameters.items()]) if id(p) not in self._number_of}
        if not new:
            return
        for name, parameter in new.items():
            if not is_dense(parameter):
                raise MisuseError(
                    f"parameter {name!r} has gaps or overlaps in memory (strides {parameter.stride()}), so it cannot "
                    "be divided among the workers: make it contiguous, or leave shard= out"
                )
        first = len(self._parameters)
        sizes = [Size(p.numel(), p.dtype, id(p) in self.whole) for p in new.values()]
        at_most = GPU_CHUNK_NUMEL if self._world.device.type == "cuda" else CHUNK_NUMEL
        numel = chunk_numel(sum(size.numel for size in sizes), self._world.size, at_most)
        chunks = cut(sizes, self._weights, numel, copies=self.copies, loads=self.loads, first=first)
        self._parameters += new.values()
        self._number_of |= {id(p): number for number, p in enumerate(new.values(), first)}
        self.chunks += chunks
        for chunk in chunks:
            for piece in chunk.pieces:
                self._add(piece, chunk)

    def _add(self, piece: Piece, chunk: Chunk) -> None:
        parameter = self._parameters[piece.parameter]
        tensor = parameter.detach()
        if id(parameter) not in self.whole:
            tensor = flat(tensor)[piece.start : piece.stop]
        self._tensors[piece] = tensor
        if self._world.rank in chunk.holders:
            if self.update_dtype(tensor.dtype) != tensor.dtype:
                self._masters[id(tensor)] = tensor.to(self.update_dtype(tensor.dtype))
            own = self.updated(tensor)
            self._own_of.setdefault(id(parameter), []).append(own)
            self._start_of[id(own)], self._view_of[id(own)] = piece.start, tensor
            if self._world.rank != chunk.owner:
                self._with_copies.add(id(own))

    @property
    def loads(self) -> list[int]:
        """The number of elements that each worker holds, by rank."""
        loads = [0] * len(self._weights)
        for chunk in self.chunks:
            for rank in chunk.holders:
                loads[rank] += chunk.numel
        return loads

    def divided_among(self, ranks: Sequence[int]) -> dict[int, int]:
        """Assign whole parameters to `ranks`: by id, the rank that holds most of one; on ties the least loaded one."""
        held = {id(parameter): dict.fromkeys(ranks, 0) for parameter in self._parameters}
        for chunk in self.chunks:
            for piece in chunk.pieces:
                for rank in chunk.holders:
                    if rank in ranks:
                        held[id(self.parameter(piece))][rank] += piece.stop - piece.start
        loads = dict.fromkeys(ranks, 0)
        chosen = {}
        for parameter in self._parameters:
            own = held[id(parameter)]
            chosen[id(parameter)] = rank = max(ranks, key=lambda rank: (own[rank], -loads[rank]))
            loads[rank] += parameter.numel()
        return chosen

    @property
    def own_share(self) -> float:
        """The part of all elements that this worker holds."""
        return self.loads[self._world.rank] / max(sum(chunk.numel for chunk in self.chunks), 1)

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """All divided parameters, in the order of their division."""
        return self._parameters

    def own_pieces(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of a parameter that this worker updates: views of it, or masters of higher precision."""
        return self._own_of.get(id(parameter), [])

    def start_of(self, own: torch.Tensor) -> int:
        """The offset of a piece of `own_pieces` in its parameter."""
        return self._start_of[id(own)]

    def view_of(self, own: torch.Tensor) -> torch.Tensor:
        """The view of the parameter that corresponds to a piece of `own_pieces`."""
        return self._view_of[id(own)]

    def is_owner(self, own: torch.Tensor) -> bool:
        """Whether this worker is the first holder of a piece of `own_pieces`."""
        return id(own) not in self._with_copies

    def updated(self, view: torch.Tensor) -> torch.Tensor:
        """The tensor that a holder updates: the master of this view if it has one, else the view itself."""
        return self._masters.get(id(view), view)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which pieces of parameters are updated."""
        return torch.float32 if self.has_masters and dtype in (torch.bfloat16, torch.float16) else dtype

    @torch.no_grad()
    def copy_masters(self, *, to_weights: bool) -> None:
        """Round the masters to the weights after an update, or set them from loaded weights."""
        views = [view for view in self._tensors.values() if id(view) in self._masters]
        masters = [self._masters[id(view)] for view in views]
        if views:
            torch._foreach_copy_(*((views, masters) if to_weights else (masters, views)))

    def tensor(self, piece: Piece) -> torch.Tensor:
        return self._tensors[piece]

    def parameter(self, piece: Piece) -> torch.Tensor:
        return self._parameters[piece.parameter]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a contiguous range of memory without overlaps."""
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
