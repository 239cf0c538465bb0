"""Seeds that belong to the work: fixed for ever, apart from each other, and no disturbance to anybody else's."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.generators import host_randomness, seed_device
from paceline.core.seeding import Purpose, derive_seed, mix64

CPU = torch.device("cpu")
INTEGERS = st.integers(0, 2**63 - 1)


def test_mix64_is_splitmix64() -> None:
    """The first outputs of the published generator, seeded with 0: its state grows by the golden ratio."""
    golden = 0x9E3779B97F4A7C15
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert mix64(golden) == 0x6E789E6AA1B965F4
    assert mix64(2 * golden % 2**64) == 0x06C45D188009454F


@pytest.mark.parametrize(
    ("seed", "purpose", "numbers", "expected"),
    [
        (0, Purpose.MODEL_INIT, (), 313702574736366215),
        (0, Purpose.MICRO_BATCH, (0, 0), 7425240232160906449),
        (0, Purpose.MICRO_BATCH, (1, 0), 6883077357375541696),
        (0, Purpose.MICRO_BATCH, (0, 1), 1783015123115954001),
        (7, Purpose.AFTER_STEP, (41,), 3074463862133794010),
        (7, Purpose.EVALUATION, (3,), 6545090522069755731),
        (-1, Purpose.SAMPLE, (0, 123456789), 5433022036778767580),
        (2**63, Purpose.SAMPLE_BLOCK, (5, 96), 8705631704032225089),
    ],
)
def test_seeds_never_change(seed: int, purpose: Purpose, numbers: tuple[int, ...], expected: int) -> None:
    """A run that is resumed by a later version must go on with the same random numbers."""
    assert derive_seed(seed, purpose, *numbers) == expected


def test_purposes_never_change() -> None:
    assert {purpose.name: purpose.value for purpose in Purpose} == {
        "MODEL_INIT": 1,
        "MICRO_BATCH": 2,
        "AFTER_STEP": 3,
        "EVALUATION": 4,
        "SAMPLE": 5,
        "SAMPLE_BLOCK": 6,
        "SHUFFLE_BUFFER": 7,
        "ORDER": 8,
        "COMPRESSION": 9,
    }


def test_different_uses_have_different_seeds() -> None:
    uses = list(product((0, 1, 2**32), Purpose, range(20), range(20)))
    uses += list(product((0, 1, 2**32), Purpose, range(20)))
    uses += list(product((0, 1, 2**32), Purpose))
    assert len({derive_seed(*use) for use in uses}) == len(uses)


@given(INTEGERS, st.sampled_from(Purpose), st.lists(INTEGERS, max_size=3))
def test_a_seed_fits_every_generator(seed: int, purpose: Purpose, numbers: list[int]) -> None:
    derived = derive_seed(seed, purpose, *numbers)
    assert 0 <= derived < 2**63
    torch.Generator().manual_seed(derived)


def test_seeding_the_device_makes_its_numbers_repeatable() -> None:
    seed_device(CPU, 5)
    first = torch.rand(4)
    assert not torch.equal(torch.rand(4), first)
    seed_device(CPU, 5)
    assert torch.equal(torch.rand(4), first)
    seed_device(CPU, 6)
    assert not torch.equal(torch.rand(4), first)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4), first), "the same stream that torch.manual_seed starts"


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_host_randomness_seeds_three_generators() -> None:
    with host_randomness() as randomness:
        randomness.seed(2**62 + 1)
        first = draw()
        assert all(a != b for a, b in zip(draw(), first, strict=True))
        randomness.seed(2**62 + 1)
        assert draw() == first
        randomness.seed(2**62 + 2)
        assert all(a != b for a, b in zip(draw(), first, strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_host_randomness_leaves_the_users_streams_where_they_were(fails: bool) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    np.random.standard_normal()  # NumPy keeps the second normal of a pair: part of the state
    torch.randn(3)
    with host_randomness():
        expected = draw(), np.random.standard_normal()
    with pytest.raises(ZeroDivisionError) if fails else host_randomness(), host_randomness() as randomness:
        randomness.seed(9)
        draw()
        if fails:
            raise ZeroDivisionError
    assert (draw(), np.random.standard_normal()) == expected
