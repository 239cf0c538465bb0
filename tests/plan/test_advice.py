from __future__ import annotations

import pytest

from paceline.plan.advice import Kind, advice, alternatives
from paceline.plan.predict import Device, Hardware, Link, Workload

WORK = Workload(24, 4, 1e6, num_samples=9600, epochs=3)
A, B = Device("A", 0.1, host="a"), Device("B", 0.2, host="b")
NEAR = Hardware(link=Link(1e9))


def test_alternatives_are_sorted_and_priced() -> None:
    found = alternatives(WORK, [Kind(A, 2, 2.0), Kind(B, 1, 0.5)], NEAR)
    usual = [each for each in found if each.strategy == "gradients"]
    assert [each.workers for each in usual] == ["2xA,1xB", "2xA", "1xA,1xB", "1xA", "1xB"]
    assert [each.samples_per_s for each in usual] == sorted((each.samples_per_s for each in usual), reverse=True)
    alone = usual[3]
    assert (alone.epoch_s, alone.run_s) == (pytest.approx(240), pytest.approx(720))
    assert alone.cost(alone.epoch_s) == pytest.approx(2.0 * 240 / 3600)
    assert {each.strategy for each in found} == {"gradients", "cadence", "averaging every 32"}


def test_a_slow_device_that_helps_is_recommended() -> None:
    text = advice(alternatives(WORK, [Kind(A, 2, 2.0), Kind(B, 1, 0.5)], NEAR))
    assert text.startswith("Use 2xA,1xB with gradients: ")
    assert "B adds 20% to the speed, and -6% to the cost of an epoch." in text


def test_a_device_that_is_not_worth_it_is_left_out() -> None:
    far = Hardware(link=Link(1e6))
    text = advice(alternatives(WORK, [Kind(A, 2), Kind(B, 1)], far))
    assert text.startswith("Use 2xA with gradients: ")
    assert "B is not worth plugging in: it changes the speed by -" in text
    assert "With averaging every 32 2xA,1xB would be" in text


@pytest.mark.parametrize(("micro_batch_s", "speed"), [(0.1, "40 samples/s (3"), (1e-4, "40,000 samples/s (3")])
def test_large_speeds_are_written_out(micro_batch_s: float, speed: str) -> None:
    assert f"Use 1xA with gradients: {speed}" in advice(alternatives(WORK, [Kind(Device("A", micro_batch_s), 1)], NEAR))


def test_further_machines_of_a_kind() -> None:
    kind = Kind(A, 4, per_host=2)
    assert [device.host for device in kind.devices(4)] == ["a", "a", "a#1", "a#1"]
    assert len({device.host for device in Kind(A, 4).devices(4)}) == 1


def test_nobody() -> None:
    with pytest.raises(ValueError, match="there is no worker to predict for"):
        alternatives(WORK, [], NEAR)
