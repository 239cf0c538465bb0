"""The division of a model among the workers of one world: each one holds pieces of the parameters, which it updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.core.errors import MisuseError
from paceline.core.world import World
from paceline.plan.memory import CHUNK_NUMEL, GPU_CHUNK_NUMEL, chunk_numel
from paceline.plan.sharding import Chunk, Piece, Size, cut
from paceline.sync.gradients.layout import memory_order


@dataclass(frozen=True, eq=False)
class OwnPiece:
    """A piece that this worker holds.

    weights: a view of the parameter. updated: what the optimizer updates, the same or a copy of higher precision.
    start: the offset in the parameter. is_owner: this worker is the first holder.
    """

    weights: torch.Tensor
    updated: torch.Tensor
    start: int
    is_owner: bool


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
        self._own: dict[int, list[OwnPiece]] = {}  # by id of the parameter
        self._updated: dict[int, torch.Tensor] = {}  # by id of the view, of own pieces

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
            updated = tensor.to(self.update_dtype(tensor.dtype))  # the view itself unless the dtype differs
            own = OwnPiece(tensor, updated, piece.start, self._world.rank == chunk.owner)
            self._own.setdefault(id(parameter), []).append(own)
            self._updated[id(tensor)] = updated

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

    def own_pieces(self, parameter: torch.Tensor) -> list[OwnPiece]:
        """The pieces of a parameter that this worker updates."""
        return self._own.get(id(parameter), [])

    def updated(self, view: torch.Tensor) -> torch.Tensor:
        """The tensor that this worker, a holder, updates for a view of a parameter."""
        return self._updated[id(view)]

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which pieces of parameters are updated."""
        return torch.float32 if self.has_masters and dtype in (torch.bfloat16, torch.float16) else dtype

    @torch.no_grad()
    def copy_masters(self, *, to_weights: bool) -> None:
        """Round the masters to the weights after an update, or set them from loaded weights."""
        pieces = [own for pieces in self._own.values() for own in pieces if own.updated is not own.weights]
        weights, masters = [own.weights for own in pieces], [own.updated for own in pieces]
        if pieces:
            torch._foreach_copy_(*((weights, masters) if to_weights else (masters, weights)))

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
