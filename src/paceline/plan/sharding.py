"""Which worker keeps and updates which part of a model that is divided among the workers.

Parameters are cut at multiples of SEGMENT_NUMEL on any number of workers. Norms are computed by segment, so the norm of
a parameter does not depend on the division.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SEGMENT_NUMEL = 1 << 18


class Piece(NamedTuple):
    """Elements start to stop of a parameter, in the order of its memory."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """Consecutive pieces with one owner. They are exchanged together, and a parameter occurs at most once.

    holders: the ranks that keep and update them, the owner first.
    """

    holders: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def owner(self) -> int:
        return self.holders[0]

    @property
    def numel(self) -> int:
        return sum(stop - start for _, start, stop in self.pieces)


@dataclass(frozen=True)
class Size:
    """A parameter that is to be divided. kind: pieces of one chunk are of one kind. is_whole: it must not be cut."""

    numel: int
    kind: Hashable = None
    is_whole: bool = False


def cut(
    sizes: Sequence[Size],
    weights: Sequence[float],
    chunk_numel: int,
    *,
    copies: int = 1,
    loads: Sequence[int] = (),
    first: int = 0,
) -> list[Chunk]:
    """Chunks of about `chunk_numel` elements, held in proportion to the weights. A weight of 0 holds nothing.

    sizes: in the order in which chunks are to be exchanged. copies: holders of each chunk, at most all workers. loads:
    elements that each worker already holds. first: the number of the first parameter.
    """
    loads = list(loads) or [0] * len(weights)
    able = [rank for rank, weight in enumerate(weights) if weight > 0]
    chunks = []
    for pieces in _group(sizes, chunk_numel, first):
        numel = sum(stop - start for _, start, stop in pieces)
        holders = sorted(able, key=lambda rank: ((loads[rank] + numel) / weights[rank], rank))[:copies]
        for rank in holders:
            loads[rank] += numel
        chunks.append(Chunk(tuple(holders), tuple(pieces)))
    return chunks


def _group(sizes: Sequence[Size], capacity: int, first: int) -> list[list[Piece]]:
    """Pieces in groups of up to `capacity` elements, or of one piece: a segment, or a parameter that is not cut."""
    groups: list[list[Piece]] = []
    room, kind = 0, None
    for number, size in enumerate(sizes, first):
        start, is_done = 0, False
        while not is_done:
            take = _fitting(size, start, room)
            if not groups or kind != size.kind or take is None:
                groups.append([])
                room, kind = capacity, size.kind
                take = _fitting(size, start, room)
                if take is None:
                    take = size.numel - start if size.is_whole else min(SEGMENT_NUMEL, size.numel - start)
            groups[-1].append(Piece(number, start, start + take))
            room -= take
            start += take
            is_done = start == size.numel
    return groups


def _fitting(size: Size, start: int, room: int) -> int | None:
    """How many elements from `start` on fit; None if not even a segment does."""
    if (rest := size.numel - start) <= room:
        return rest
    return None if size.is_whole else max(room, 0) // SEGMENT_NUMEL * SEGMENT_NUMEL or None
