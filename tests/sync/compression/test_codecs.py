"""Encodings: no bias or a residual, a bounded error, bytes that come back as the values they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.sync.compression import quantize, sparse
from paceline.sync.compression.codec import Codec, codec_for
from paceline.sync.compression.quantize import BlockQuantizer
from paceline.sync.compression.sparse import TopK

CODECS = ("int8", "int4", "sparse")


def codec(name: Any) -> Codec:
    found = codec_for(name)
    assert found is not None
    return found


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
def test_the_number_of_bytes_is_known_and_the_seed_decides_all_of_them(
    name: str, values: torch.Tensor, seed: int
) -> None:
    packed = codec(name).encode(values, seed)
    assert packed.dtype == torch.uint8
    assert packed.shape == (codec(name).num_bytes(values.numel()),)
    assert torch.equal(packed, codec(name).encode(values.clone(), seed))
    assert codec(name).decode(packed, values.numel()).shape == values.shape


@pytest.mark.parametrize("bits", [8, 4])
@given(values=tensors(), seed=st.integers(0, 2**62))
def test_a_quantized_value_is_off_by_less_than_a_level_of_its_block(bits: int, values: torch.Tensor, seed: int) -> None:
    quantizer = BlockQuantizer(bits)
    decoded = quantizer.decode(quantizer.encode(values, seed), values.numel())
    for own, found in zip(values.split(quantize.BLOCK), decoded.split(quantize.BLOCK), strict=True):
        level = own.abs().max() / quantizer.levels if len(own) else torch.tensor(0.0)
        assert (own - found).abs().le(level * (1 + 1e-5)).all()


@pytest.mark.parametrize("bits", [8, 4])
@given(values=tensors(), seed=st.integers(0, 2**62))
def test_multiples_of_a_level_come_back_as_they_were(bits: int, values: torch.Tensor, seed: int) -> None:
    """What was decoded is encoded again without an error, whatever the rounding: packing loses nothing."""
    quantizer = BlockQuantizer(bits)
    numbers = torch.randint(-quantizer.levels, quantizer.levels + 1, (1 + len(values) // quantize.BLOCK, 256))
    numbers[:, 7] = quantizer.levels  # the largest of each block
    exact = (numbers * 2.0**-3).view(-1)
    assert torch.equal(quantizer.decode(quantizer.encode(exact, seed), exact.numel()), exact)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantization_has_no_bias(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean error of many roundings goes to zero as that of independent ones does, also where they share numbers."""
    monkeypatch.setattr(quantize, "NOISE_BLOCKS", 2)
    quantizer, num_rounds, numel = BlockQuantizer(bits), 2000, 5 * quantize.BLOCK
    values = torch.randn(numel, generator=torch.Generator().manual_seed(3))
    rounded = [quantizer.decode(quantizer.encode(values, seed), numel) for seed in range(num_rounds)]
    errors = torch.stack(rounded) - values
    level = values.view(-1, quantize.BLOCK).abs().amax(dim=1).repeat_interleave(quantize.BLOCK) / quantizer.levels
    # The standard deviation of a rounding is at most half a level; 5 of them for 1280 values.
    assert (errors.mean(dim=0).abs() <= 5 * level / 2 / num_rounds**0.5 + 1e-6).all()
    assert errors.abs().max() > level.min() / 4  # and single roundings do err


@given(values=tensors())
def test_what_is_not_sent_is_smaller_than_what_is(values: torch.Tensor) -> None:
    packed = TopK().encode(values, 0)
    decoded = TopK().decode(packed, values.numel())
    for own, found in zip(values.split(sparse.BLOCK), decoded.split(sparse.BLOCK), strict=True):
        assert found.count_nonzero() <= sparse.PER_BLOCK
        largest = own.abs().max() if len(own) else torch.tensor(0.0)
        left = own[found == 0].abs()
        # Not among the 128 largest, or rounded to zero.
        least_sent = own[found != 0].abs().min() if found.count_nonzero() else largest
        assert left.le(torch.maximum(least_sent, largest / sparse.LEVELS / 2 * (1 + 1e-5))).all()
        assert (own - found)[found != 0].abs().le(largest / sparse.LEVELS / 2 * (1 + 1e-5)).all()


@given(st.lists(tensors(), min_size=1, max_size=4), st.sampled_from(CODECS))
def test_what_was_sent_and_the_residual_are_what_was_given(given_values: list[torch.Tensor], name: str) -> None:
    """Over any number of exchanges: nothing is lost, only late."""
    numel = min(map(len, given_values))
    residual, sent, total = torch.zeros(3, numel)
    for seed, values in enumerate(given_values):
        wanted = values[:numel] + residual
        decoded = codec(name).decode(codec(name).encode(wanted, seed), numel)
        residual = wanted - decoded
        sent, total = sent + decoded, total + values[:numel]
    torch.testing.assert_close(sent + residual, total, rtol=1e-5, atol=1e-5 * float(total.abs().max() if numel else 0))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_not_hidden(name: str, value: float) -> None:
    values = torch.ones(10_000)
    values[5000] = value
    decoded = codec(name).decode(codec(name).encode(values, 0), len(values))
    assert not decoded[4096:8192].isfinite().all()
    assert decoded[:4096].isfinite().all()


@pytest.mark.parametrize(("name", "bits"), [("int8", 8.125), ("int4", 4.125), ("sparse", 0.5078)])
def test_bits_per_value(name: str, bits: float) -> None:
    assert 8 * codec(name).num_bytes(1 << 20) / (1 << 20) == pytest.approx(bits, rel=1e-4)
