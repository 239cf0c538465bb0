"""Who owns which piece of a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan import sharding
from paceline.plan.sharding import Chunk, Piece, Size, cut


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "SEGMENT_NUMEL", 10)


# sizes, weights, elements of a chunk, then the chunks as (owner, pieces)
CUTS = [
    ([7, 2], (1, 1), 10, [(0, [(0, 0, 7), (1, 0, 2)])]),
    ([35], (1, 1), 20, [(0, [(0, 0, 20)]), (1, [(0, 20, 35)])]),
    ([5, 35], (1, 1), 20, [(0, [(0, 0, 5), (1, 0, 10)]), (1, [(1, 10, 30)]), (0, [(1, 30, 35)])]),
    ([25], (1, 1), 3, [(0, [(0, 0, 10)]), (1, [(0, 10, 20)]), (0, [(0, 20, 25)])]),
    ([10, 10, 10, 10], (3, 1), 10, [(0, [(0, 0, 10)]), (0, [(1, 0, 10)]), (0, [(2, 0, 10)]), (1, [(3, 0, 10)])]),
    ([10, 10], (0, 1), 10, [(1, [(0, 0, 10)]), (1, [(1, 0, 10)])]),
    ([0, 4], (1,), 10, [(0, [(0, 0, 0), (1, 0, 4)])]),
]


@pytest.mark.parametrize(("sizes", "weights", "numel", "expected"), CUTS)
def test_chunks(sizes: list[int], weights: tuple[float, ...], numel: int, expected: list[object]) -> None:
    chunks = cut([Size(size) for size in sizes], weights, numel)
    assert chunks == [Chunk((owner,), tuple(Piece(*each) for each in pieces)) for owner, pieces in expected]


def test_a_whole_parameter_is_not_cut_and_kinds_do_not_mix() -> None:
    sizes = [Size(35, is_whole=True), Size(3, "bf16"), Size(3, "float32")]
    assert [chunk.pieces for chunk in cut(sizes, (1, 1), 20)] == [((0, 0, 35),), ((1, 0, 3),), ((2, 0, 3),)]


def test_copies_are_held_by_different_workers() -> None:
    chunks = cut([Size(10)] * 6, (1, 1, 1, 0), 10, copies=2)
    assert [chunk.holders for chunk in chunks] == [(0, 1), (2, 0), (1, 2)] * 2
    assert [chunk.holders for chunk in cut([Size(10)], (1, 0), 10, copies=2)] == [(0,)]


def test_what_workers_own_already_counts() -> None:
    assert [chunk.owner for chunk in cut([Size(10)] * 3, (1, 1), 10, loads=[15, 0], first=4)] == [1, 1, 0]


@given(
    st.lists(st.builds(Size, st.integers(0, 100), st.sampled_from("ab"), st.booleans()), min_size=1, max_size=20),
    st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    st.integers(1, 60),
)
def test_every_element_has_one_owner_and_borders_are_those_of_segments(
    sizes: list[Size], weights: list[int], numel: int
) -> None:
    chunks = cut(sizes, weights, numel)
    ends = dict.fromkeys(range(len(sizes)), 0)
    for chunk in chunks:
        assert weights[chunk.owner] > 0
        assert len({piece.parameter for piece in chunk.pieces}) == len(chunk.pieces)
        for piece in chunk.pieces:
            assert piece.start == ends[piece.parameter]
            assert piece.start % sharding.SEGMENT_NUMEL == 0
            ends[piece.parameter] = piece.stop
    assert ends == {number: size.numel for number, size in enumerate(sizes)}
    largest = max([numel, 10, *(size.numel for size in sizes if size.is_whole)])
    loads = [sum(chunk.numel for chunk in chunks if chunk.owner == rank) for rank in range(len(weights))]
    # A chunk goes where the load by weight is least after it: so no worker is ahead by more than one chunk per worker.
    bound = (sum(loads) + (len(weights) - 1) * largest) / sum(weights)
    assert all(load <= weight * bound + 1e-9 for load, weight in zip(loads, weights, strict=True))
