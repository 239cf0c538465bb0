"""Encodings: no bias or a residual, a bounded error, bytes that come back as the values they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.sync.compression import quantize, sparse
from paceline.sync.compression.codec import CODECS, Codec
from paceline.sync.compression.quantize import BlockQuantizer


def codec(name: str) -> Codec:
    return CODECS[name]()


def encoded(name: str, values: torch.Tensor, seed: int) -> torch.Tensor:
    packed = torch.empty(codec(name).num_bytes(values.numel()), dtype=torch.uint8)
    codec(name).encode(values, seed, packed)
    return packed


def decoded(name: str, packed: torch.Tensor, numel: int) -> torch.Tensor:
    values = torch.zeros(numel)
    codec(name).add_decoded(packed, 1.0, values)
    return values


def rounded(name: str, values: torch.Tensor, seed: int) -> torch.Tensor:
    return decoded(name, encoded(name, values, seed), values.numel())


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any number of values, in blocks whose magnitudes may be far apart, some of them zero."""
    numel = draw(st.integers(0, 9000))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    exponents = draw(st.lists(st.integers(-30, 30), min_size=1, max_size=5))
    scales = torch.tensor([10.0**exponent for exponent in exponents]).repeat_interleave(256).repeat(8)[:numel]
    values = torch.randn(numel, generator=random)[: len(scales)] * scales
    return values * (torch.rand(len(values), generator=random) < draw(st.sampled_from([0.0, 0.02, 0.5, 1.0])))


@pytest.mark.parametrize("name", CODECS)
@given(values=tensors(), seed=st.integers(0, 2**62))
def test_the_seed_decides_all_bytes(name: str, values: torch.Tensor, seed: int) -> None:
    before = values.clone()
    packed = encoded(name, values, seed)
    assert torch.equal(values, before)
    assert torch.equal(packed, encoded(name, values, seed))


@pytest.mark.parametrize("name", CODECS)
@given(values=tensors(), weight=st.sampled_from([0.5, -2.0]))
def test_decoded_values_are_added_with_a_weight(name: str, values: torch.Tensor, weight: float) -> None:
    packed = encoded(name, values, 0)
    total = torch.ones_like(values)
    codec(name).add_decoded(packed, weight, total)
    torch.testing.assert_close(total, 1 + weight * decoded(name, packed, len(values)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
@given(values=tensors(), seed=st.integers(0, 2**62))
def test_a_quantized_value_is_off_by_less_than_a_level_of_its_block(bits: int, values: torch.Tensor, seed: int) -> None:
    found = rounded(f"int{bits}", values, seed)
    for own, part in zip(values.split(quantize.BLOCK), found.split(quantize.BLOCK), strict=True):
        level = own.abs().max() / BlockQuantizer(bits).levels if len(own) else torch.tensor(0.0)
        assert (own - part).abs().le(level * (1 + 1e-5)).all()


@pytest.mark.parametrize("bits", [8, 4])
@given(num_blocks=st.integers(1, 30), seed=st.integers(0, 2**62))
def test_multiples_of_a_level_come_back_as_they_were(bits: int, num_blocks: int, seed: int) -> None:
    """What was decoded is encoded again without an error, whatever the rounding: packing loses nothing."""
    levels = BlockQuantizer(bits).levels
    numbers = torch.randint(-levels, levels + 1, (num_blocks, quantize.BLOCK))
    numbers[:, 7] = levels  # the largest of each block
    exact = (numbers * 2.0**-3).view(-1)
    assert torch.equal(rounded(f"int{bits}", exact, seed), exact)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantization_has_no_bias(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all offsets of the random numbers the mean is the value itself, up to the distance of two of them."""
    monkeypatch.setattr(quantize, "NUM_OFFSETS", 512)
    monkeypatch.setattr(quantize, "CHUNK", 1024)
    monkeypatch.setattr(quantize, "_noise_table", quantize._noise_table.__wrapped__)
    values = torch.randn(5 * quantize.BLOCK, generator=torch.Generator().manual_seed(3))
    errors = torch.stack([rounded(f"int{bits}", values, seed) for seed in range(512)]) - values
    level = values.view(-1, quantize.BLOCK).abs().amax(dim=1).repeat_interleave(quantize.BLOCK)
    level /= BlockQuantizer(bits).levels
    assert (errors.mean(dim=0).abs() <= level / 512).all()
    assert errors.abs().max() > level.min() / 4  # and single roundings do err


def test_random_numbers_are_uniform_and_those_of_other_offsets_are_unrelated() -> None:
    noise = quantize._noise(torch.device("cpu"), 0, quantize.NUM_OFFSETS)
    assert torch.equal(noise.sort().values, (torch.arange(quantize.NUM_OFFSETS) + 0.5) / quantize.NUM_OFFSETS)
    for offset in (1, 2, quantize.BLOCK, 12345):
        other = quantize._noise(torch.device("cpu"), offset, quantize.NUM_OFFSETS)
        assert abs(torch.corrcoef(torch.stack([noise, other]))[0, 1]) < 5 / quantize.NUM_OFFSETS**0.5


@pytest.mark.parametrize("bits", [8, 4])
@given(values=tensors(), seed=st.integers(0, 2**62), chunk=st.integers(1, 5))
def test_the_bytes_do_not_depend_on_the_chunks(bits: int, values: torch.Tensor, seed: int, chunk: int) -> None:
    whole = encoded(f"int{bits}", values, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "CHUNK", chunk * quantize.BLOCK)
        assert torch.equal(encoded(f"int{bits}", values, seed), whole)
        found = decoded(f"int{bits}", whole, len(values))
    assert torch.equal(found, decoded(f"int{bits}", whole, len(values)))


@given(values=tensors())
def test_what_is_not_sent_is_smaller_than_what_is(values: torch.Tensor) -> None:
    sent = rounded("sparse", values, 0)
    for own, found in zip(values.split(sparse.BLOCK), sent.split(sparse.BLOCK), strict=True):
        assert found.count_nonzero() <= sparse.PER_BLOCK
        largest = own.abs().max() if len(own) else torch.tensor(0.0)
        left = own[found == 0].abs()
        # Not among the 128 largest, or rounded to zero.
        least_sent = own[found != 0].abs().min() if found.count_nonzero() else largest
        assert left.le(torch.maximum(least_sent, largest / sparse.LEVELS / 2 * (1 + 1e-5))).all()
        assert (own - found)[found != 0].abs().le(largest / sparse.LEVELS / 2 * (1 + 1e-5)).all()


@given(st.lists(tensors(), min_size=1, max_size=4), st.sampled_from([*CODECS]))
def test_what_was_sent_and_the_residual_are_what_was_given(given_values: list[torch.Tensor], name: str) -> None:
    """Over any number of exchanges: nothing is lost, only late."""
    numel = min(map(len, given_values))
    residual, sent, total = torch.zeros(3, numel)
    for seed, values in enumerate(given_values):
        wanted = values[:numel] + residual
        found = rounded(name, wanted, seed)
        residual = wanted - found
        sent, total = sent + found, total + values[:numel]
    torch.testing.assert_close(sent + residual, total, rtol=1e-5, atol=1e-5 * float(total.abs().max() if numel else 0))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_not_hidden(name: str, value: float) -> None:
    values = torch.ones(10_000)
    values[5000] = value
    found = rounded(name, values, 0)
    size = {"sparse": sparse.BLOCK}.get(name, quantize.BLOCK)
    is_finite = torch.stack([block.isfinite().all() for block in found.split(size)])
    assert is_finite.logical_not().nonzero().tolist() == [[5000 // size]]


@pytest.mark.parametrize(("name", "bits"), [("int8", 8.125), ("int4", 4.125), ("sparse", 0.5078)])
def test_bits_per_value(name: str, bits: float) -> None:
    assert 8 * codec(name).num_bytes(1 << 20) / (1 << 20) == pytest.approx(bits, rel=1e-4)
