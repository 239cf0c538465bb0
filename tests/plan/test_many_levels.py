"""Levels of many workers, which are arrays, are those of few, to the bit."""

from __future__ import annotations

from random import Random

import pytest

from paceline.plan.balance import Levels, levels
from paceline.plan.many_levels import ManyLevels


@pytest.mark.parametrize("seed", range(10))
def test_arrays_follow_readings_as_single_estimates_do(seed: int) -> None:
    """Noise, jumps, spikes and workers without a reading."""
    random = Random(seed)
    one, many = Levels([None] * 20), ManyLevels([None] * 20)
    usual = [random.uniform(0.001, 2.0) for _ in range(20)]
    noise = [random.choice((0.0, 0.005, 0.05, 0.3)) for _ in range(20)]
    for _ in range(150):
        readings = []
        for rank in range(20):
            if random.random() < 0.01:
                usual[rank] *= random.choice((0.5, 0.8, 1.2, 3.0))
            spike = 5.0 if random.random() < 0.01 else 1.0
            is_idle = random.random() < 0.1
            readings.append(0.0 if is_idle else spike * usual[rank] * max(0.1, random.gauss(1, noise[rank])))
        one.observe(readings)
        many.observe(readings)
        assert many.values == one.values
    assert many.to_list() == one.to_list()
    assert ManyLevels([one[rank] for rank in range(20)]).to_list() == one.to_list()


def test_many_workers_are_arrays() -> None:
    assert type(levels([None] * 63)) is Levels
    assert type(levels([None] * 64)) is ManyLevels
