"""Weighted sums over flat buffers: the plain ones add up, the exact ones do so whatever the order and the scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.single import SingleCommunicator
from paceline.core.world import World
from paceline.sync.gradients.grids import Grids
from paceline.sync.gradients.layout import BLOCK_NUMEL, BucketLayout, cut_into_buckets
from paceline.sync.gradients.rounding import CPU_BLOCKS, ExactSums
from paceline.sync.gradients.sums import PlainSums

ALONE = SingleCommunicator(World())
FLOAT32_ROUNDING = 2.0**-24


def layout(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> BucketLayout:
    return BucketLayout({f"p{i}": torch.zeros(shape, dtype=dtype) for i, shape in enumerate(shapes)}, 0)


def exact_sums(made: BucketLayout, micro_batches: Sequence[Sequence[torch.Tensor]]) -> tuple[ExactSums, Grids]:
    """Calibrated by the first micro-batch."""
    sums, grids = ExactSums(made, torch.zeros(made.numel, dtype=torch.float64)), Grids(made.names)
    grids.calibrate(sums.peaks_of(micro_batches[0], 1.0).numpy(), len(micro_batches))
    sums.set_anchors(grids.anchors)
    return sums, grids


def test_every_parameter_starts_at_a_block() -> None:
    made = layout((3,), (0,), (BLOCK_NUMEL,), (5, 60))
    flat = torch.arange(float(made.numel))
    starts = [view.storage_offset() / BLOCK_NUMEL for view in made.views(flat)]
    assert starts == [0, 1, 2, 3]  # the empty one has a block too
    assert made.owner_of_block.tolist() == [0, 1, 2, 3, 3, 3]
    assert made.peaks(np.array([1.0, 0.0, 5.0, 2.0, 9.0, 3.0])).tolist() == [1.0, 0.0, 5.0, 9.0]
    assert made.peaks(np.array([[1.0, 0.0, 5.0, 2.0, 9.0, 3.0]] * 2)).tolist() == [[1.0, 0.0, 5.0, 9.0]] * 2


def test_views_have_the_layout_of_their_parameters() -> None:
    weight = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    made = BucketLayout({"w": weight, "t": torch.zeros(3, 5).t()}, 0)
    assert [view.stride() for view in made.views(torch.zeros(made.numel))] == [weight.stride(), (1, 5)]


def test_buckets_are_cut_by_size_and_dtype_last_parameter_first() -> None:
    parameters = {name: torch.zeros(100, dtype=torch.float64 if name == "c" else torch.float32) for name in "abcde"}
    cut = cut_into_buckets(parameters, bucket_bytes=500)
    assert [bucket.names for bucket in cut] == [["e", "d"], ["c"], ["b", "a"]]
    assert [bucket.slice for bucket in cut] == [slice(0, 2), slice(2, 3), slice(3, 5)]
    assert [bucket.names for bucket in cut_into_buckets(dict(list(parameters.items())[:2]), math.inf)] == [["b", "a"]]


@pytest.mark.parametrize("kind", [PlainSums, ExactSums])
def test_a_parameter_without_a_gradient_keeps_nothing_of_an_earlier_step(kind: type) -> None:
    made = layout((3,), (4,))
    sums = kind(made, torch.zeros(made.numel, dtype=torch.float64 if kind is ExactSums else torch.float32))
    sums.add([torch.ones(3), torch.ones(4)], 1.0, first=True)
    sums.add([torch.ones(3), None], 2.0, first=True)
    sums.add([None, torch.full((4,), 5.0)], 1.0, first=False)
    assert [mean.tolist() for mean in sums.means(None)] == [[2.0] * 3, [5.0] * 4]
    assert sums.means(torch.tensor(2.0, dtype=sums.flat.dtype))[0].tolist() == [1.0] * 3
    sums.clear()
    assert not sums.flat.any()


@pytest.mark.parametrize("weight", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize("numel", [1, BLOCK_NUMEL, CPU_BLOCKS * BLOCK_NUMEL + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_terms", [1, 2, 3])
def test_exact_sums_are_those_of_the_formula(numel: int, weight: float, dtype: torch.dtype, num_terms: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    made = layout((numel,), (7,), dtype=dtype)
    terms = [[torch.randn(n, generator=generator).to(dtype) for n in (numel, 7)] for _ in range(num_terms)]
    sums, grids = exact_sums(made, terms)
    for number, term in enumerate(terms):
        sums.add(term, weight, first=number == 0)
    assert sums.take_peaks() == [[abs(t.double() * weight).max().item() for t in term] for term in terms]
    for index, (view, anchor) in enumerate(zip(made.views(sums.flat), grids.anchors, strict=True)):
        rounded = [(term[index].double() * weight + anchor) - anchor for term in terms]
        assert torch.equal(view, torch.stack(rounded).sum(0))


def test_not_a_number_passes_through_and_is_seen() -> None:
    made = layout((300,), (5,))
    bad = torch.ones(300)
    bad[200] = math.nan
    sums, _ = exact_sums(made, [[torch.ones(300), torch.ones(5)]])
    sums.add([bad, torch.ones(5)], 1.0, first=True)
    [(first, second)] = sums.take_peaks()
    assert math.isnan(first)
    assert second == 1
    assert sums.means(None)[0].isnan().nonzero().tolist() == [[200]]


@settings(max_examples=60)
@given(
    exponents=st.lists(st.integers(-100, 100), min_size=1, max_size=5),
    num_terms=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_the_order_never_shows_and_no_tensor_pays_for_another(
    exponents: list[int], num_terms: int, seed: int, data: st.DataObject
) -> None:
    """Gradients from 1e-30 to 1e30 in one model: each keeps what float32 has, and any order gives the same bits."""
    generator = torch.Generator().manual_seed(seed)
    made = layout(*[(50,)] * len(exponents))
    terms = [[torch.randn(50, generator=generator) * 2.0**e for e in exponents] for _ in range(num_terms)]
    sums, grids = exact_sums(made, terms)

    def total(order: list[int]) -> torch.Tensor:
        for place, number in enumerate(order):
            sums.add(terms[number], 1.0, first=place == 0)
            assert grids.fit(np.array(sums.take_peaks()[0]), num_terms)
        return sums.flat.clone()

    in_order = total(list(range(num_terms)))
    assert torch.equal(in_order, total(data.draw(st.permutations(range(num_terms)))))
    for index, mean in enumerate(sums.means(None)):
        exact = torch.stack([term[index].double() for term in terms])
        error = (mean.double() - exact.sum(0)).abs().max()
        assert error <= FLOAT32_ROUNDING * exact.abs().sum(0).max()
