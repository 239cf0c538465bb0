from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest

from paceline.core.timing import Timing
from paceline.plan.predict import Device, Exchange, Link
from paceline.plan.profile import Profile, StepTimes, Subject, check_combinable

SUBJECT = Subject("Net", 1000, 4000, 8)
CPU = Device("cpu", 0.1, 0.01, 0.001, "here", cores=1.0, spread=0.02)
DEVICE = asdict(CPU)
PROFILE = Profile(SUBJECT, "here", 2.0, (CPU,), (2,), 0.1, Exchange(0.001, 1e6), 640, 64, 3)


def test_a_profile_is_what_its_json_says() -> None:
    assert Profile.from_json(PROFILE.to_json()) == PROFILE
    unmeasured = replace(PROFILE, exchange=Exchange())
    assert Profile.from_json(unmeasured.to_json()) == unmeasured  # JSON has no infinity
    linked = replace(PROFILE, link=Link(1e8, 0.001))
    assert Profile.from_json(linked.to_json()) == linked
    before = json.loads(PROFILE.to_json())
    del before["link"]
    assert Profile.from_json(json.dumps(before)) == PROFILE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paceline_profile": 2}, "it is not a profile of version 1: make one with `paceline plan --out`"),
        ({"colour": 1}, "the profile has unknown colour"),
        ({"subject": {}}, "the profile's subject lacks model, num_parameters"),
        ({"exchange": {"call_s": 0.0, "bytes_per_s": 1.0, "x": 1}}, "the profile's exchange has unknown x"),
        ({"exchange": {"call_s": 0.0, "bytes_per_s": 0}}, "an exchange's bytes_per_s=0 must be > 0"),
        ({"exchange": []}, "the profile's exchange is \\[\\]: it must have call_s, bytes_per_s"),
        ({"devices": []}, r"counts=\[2\] of 0 devices: give one for each kind"),
        ({"devices": 1}, "the profile's devices=1 is not a list"),
        ({"devices": [1]}, "the profile's device is 1: it must have name, micro_batch_s"),
        ({"devices": [DEVICE | {"micro_batch_s": "fast"}]}, "device: micro_batch_s='fast' must be a number"),
        ({"devices": [DEVICE | {"micro_batch_s": -1}]}, "cpu: micro_batch_s=-1 must be a finite number of seconds > 0"),
        ({"devices": [DEVICE | {"name": 5}]}, "the profile's device has name=5, which is not a str"),
        ({"devices": [DEVICE | {"cores": math.nan}]}, "the profile's device: cores=nan must be"),
        ({"counts": [2, 1]}, r"counts=\[2, 1\] of 1 devices"),
        ({"counts": [0]}, "counts=0 must be >= 1"),
        ({"host": ["here"]}, r"host=\['here'\] is not a name"),
        ({"cores": 0}, "cores=0 must be > 0"),
        ({"contention": "high"}, "contention='high' must be a number"),
        ({"global_batch": -64}, "global_batch=-64 must be >= 1"),
        ({"subject": asdict(SUBJECT) | {"micro_batch": "8"}}, "the profile's subject: micro_batch='8' must be an int"),
        ({"link": {"bytes_per_s": 1e8, "latency_s": -1.0}}, "a link's latency_s=-1.0 must be >= 0"),
    ],
)
def test_a_broken_profile_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Profile.from_json(json.dumps(json.loads(PROFILE.to_json()) | change))
    with pytest.raises(ValueError, match="it is not JSON"):
        Profile.from_json("{")


def test_means_of_steps_without_a_burst_of_other_work() -> None:
    steps = [[Timing(0.1, 0.02, 0.01, 0.0), Timing(0.2, 0.0, 0.02, 0.0)]]
    steps += [
        [Timing(0.1 * n, 0.05, 0.01, 0.002), Timing(0.2, 0.03, 0.02, 0.0)]
        for n in (1, 1.1, 0.9, 1, 1, 1, 1.1, 0.9, 1, 9)
    ]
    times = StepTimes.of(steps)
    assert times.micro_batch_s == pytest.approx((0.91 / 9, 0.2))
    assert times.rest_s == pytest.approx((0.01, 0.02))
    assert times.data_s == pytest.approx((0.002, 0.0))
    assert times.exchange_s == pytest.approx(0.03)  # the last to arrive does not wait
    with pytest.raises(ValueError, match="rank 1 had no micro-batch in 1 steps: choose a global_batch of more"):
        StepTimes.of([[Timing(0.1), Timing(0.0)]])


def test_company_shows_contention_and_the_exchange() -> None:
    together = StepTimes((0.12, 0.12), (0.01, 0.01), (0.0, 0.0), (0.0, 0.0), exchange_s=0.005)
    learned = PROFILE.with_company(together, [CPU, CPU])
    assert learned.contention == pytest.approx(0.2)
    assert learned.as_host.slowdowns([1.0, 1.0]) == pytest.approx([1.2, 1.2])
    assert learned.exchange.seconds(2, SUBJECT.gradient_bytes) == pytest.approx(0.005)
    assert PROFILE.with_company(together, [CPU]) is PROFILE


def test_a_machine_that_was_faster_in_company_is_the_mean_of_both() -> None:
    together = StepTimes((0.08, 0.08), (0.01, 0.01), (0.0, 0.0), (0.0, 0.0), exchange_s=0.005)
    learned = PROFILE.with_company(together, [CPU, CPU])
    assert learned.contention == 0
    assert learned.devices[0].micro_batch_s == pytest.approx(0.09)


def test_profiles_are_combined_only_if_they_fit() -> None:
    other = replace(PROFILE, subject=replace(SUBJECT, micro_batch=4)).renamed("old")
    with pytest.raises(ValueError, match=r"the profile of old is of another model: micro_batch 4, not 8\. Measure it"):
        check_combinable(PROFILE, [other])
    with pytest.raises(ValueError, match="two machines are named 'here': rename one with --add NAME=FILE"):
        check_combinable(PROFILE, [PROFILE])
    check_combinable(PROFILE, [PROFILE.renamed("old")])
    assert PROFILE.renamed("old").device("old").host == "old"
