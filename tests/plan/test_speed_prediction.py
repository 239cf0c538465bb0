"""Predictions as tables: what a step takes is computed by hand."""

from __future__ import annotations

import math

import pytest

from paceline.plan.cadence import Cadence
from paceline.plan.predict import (
    FACTOR_ERROR,
    MODEL_ERROR,
    Averaging,
    Device,
    Exchange,
    Hardware,
    Host,
    Link,
    Workload,
    predict,
)

FAST = Device("fast", 0.1, host="a")
SLOW = Device("slow", 0.25, host="a")
WORK = Workload(num_micro_batches=14, micro_batch=4, gradient_bytes=1e6, num_samples=5600, epochs=2)


@pytest.mark.parametrize(
    ("devices", "shares", "step_s"),
    [
        ([FAST], (14,), 1.4),
        ([FAST, FAST], (7, 7), 0.7),
        ([FAST, SLOW], (10, 4), 1.0),
        ([FAST, SLOW, SLOW], (8, 3, 3), 0.8),
        (
            [Device("x", 0.1, rest_s=0.3, host="a"), FAST],
            (6, 8),
            0.9,
        ),  # the update's time counts like that of three micro-batches
    ],
)
def test_a_step_takes_as_long_as_its_slowest_worker(devices: list[Device], shares: tuple[int, ...], step_s: float):
    predicted = predict(WORK, devices)
    assert predicted.shares == shares
    assert predicted.step_s == pytest.approx(step_s)
    assert predicted.samples_per_s == pytest.approx(56 / step_s)
    assert predicted.epoch_s(WORK) == pytest.approx(100 * step_s)


@pytest.mark.parametrize(
    ("cores", "contention", "demands", "factors"),
    [
        (2, 0.0, [1, 1], [1, 1]),
        (2, 0.0, [1, 1, 1, 1], [2, 2, 2, 2]),
        (2, 0.1, [1, 1], [1.1, 1.1]),
        (2, 0.1, [1, 0.4], [1.04, 1.1]),  # the other one runs 40% of the time
        (2, 0.0, [1, 0.7, 0.4], [1 / 0.9, 1, 1]),  # 2.1 cores are asked for
        (2, 0.1, [1, 1, 1], [1.65, 1.65, 1.65]),
        (math.inf, 0.0, [1] * 100, [1] * 100),
    ],
)
def test_workers_of_a_host_divide_its_cores(
    cores: float, contention: float, demands: list[float], factors: list[float]
):
    assert Host(cores, contention).slowdowns(demands) == pytest.approx(factors)


def test_gpus_do_not_compete_for_cores():
    hardware = Hardware({"a": Host(cores=1, contention=1.0)})
    assert predict(WORK, [FAST, FAST], hardware).step_s == pytest.approx(0.7)
    on_cpu = Device("cpu", 0.1, host="a", cores=1)
    assert predict(WORK, [on_cpu, on_cpu], hardware).step_s == pytest.approx(1.4)


@pytest.mark.parametrize(("num_workers", "seconds"), [(1, 0.0), (2, 0.1 + 0.5), (4, 0.3 + 0.75)])
def test_exchange_inside_a_host(num_workers: int, seconds: float):
    assert Exchange(call_s=0.1, bytes_per_s=2e6).seconds(num_workers, 1e6) == pytest.approx(seconds)


def test_an_exchange_is_fitted_to_what_was_measured():
    fitted = Exchange.fitted(0.05, 2, 1e6)
    assert fitted.seconds(2, 1e6) == pytest.approx(0.05)
    assert fitted.seconds(4, 1e6) > 0.05


def test_a_link_adds_its_ring():
    far = [FAST, Device("far", 0.1, host="b")]
    link = Hardware(link=Link(bytes_per_s=1e7, latency_s=0.01))
    work = Workload(14, 4, 1e6, overlap=False)
    assert predict(work, far, link).step_s == pytest.approx(0.7 + 0.02 + 0.1)
    slow = Hardware(link=Link(bytes_per_s=1e6))
    assert predict(work, far, slow).limit == "exchange"


@pytest.mark.parametrize(("num_workers", "standard_deviations"), [(1, 0.0), (2, 0.5642), (3, 0.8463), (10, 1.5388)])
def test_a_step_waits_for_whoever_is_slowest_in_it(num_workers: int, standard_deviations: float):
    noisy = Device("noisy", 0.1, host="a", spread=0.05 * 0.6745)  # of a normal distribution with a deviation of 5%
    predicted = predict(Workload(10 * num_workers, 4, 0), [noisy] * num_workers)
    assert predicted.step_s == pytest.approx(1 + 0.05 * standard_deviations, rel=1e-3)
    assert predicted.parts["noise"] == pytest.approx(0.05 * standard_deviations, rel=0.01)


def test_noise_of_a_worker_that_is_never_the_slowest_costs_nothing():
    noisy, waited_for = Device("noisy", 0.1, host="a", spread=0.05), Device("late", 0.1, 0.6, host="a")
    predicted = predict(Workload(4, 4, 0), [noisy, waited_for])
    assert predicted.shares == (4, 0)
    assert predicted.step_s == pytest.approx(0.6, rel=1e-3)


def test_averaging_exchanges_seldom():
    far = [FAST, Device("far", 0.1, host="b")]
    link = Hardware(link=Link(bytes_per_s=1e6))
    work = Workload(14, 4, 1e6, strategy=Averaging(every=10))
    assert predict(work, far, link).step_s == pytest.approx(0.7 + 0.1)
    overlapped = Workload(14, 4, 1e6, strategy=Averaging(every=10, overlap=True))
    assert predict(overlapped, far, link).step_s == pytest.approx(0.7)
    half = Workload(14, 4, 1e6, strategy=Averaging(every=10, transfer_part=0.5))
    assert predict(half, far, link).step_s == pytest.approx(0.7 + 0.05)


def test_a_cadence_keeps_the_exchange_under_its_target():
    far = [FAST, Device("far", 0.2, host="b")]
    link = Hardware(link=Link(bytes_per_s=1e6))
    work = Workload(14, 4, 1e6, strategy=Cadence(overhead_target=0.1), overlap=False)
    predicted = predict(work, far, link)
    fast, slow = predicted.shares
    assert fast == 2 * slow
    assert 1.0 / (slow * 0.2) <= 0.1
    assert predicted.samples_per_s == pytest.approx(4 * (fast + slow) / (slow * 0.2 + 1.0))


@pytest.mark.parametrize(
    ("work", "devices", "hardware", "limit"),
    [
        (WORK, [FAST], None, "compute"),
        (Workload(3, 4, 0), [FAST, FAST], None, "whole micro-batches"),
        (WORK, [Device("c", 0.1, cores=1, host="a")] * 4, Hardware({"a": Host(2)}), "shared cores"),
        (Workload(14, 4, 0, stall_s=50, save_every=100), [FAST], None, "checkpoints"),
        (Workload(14, 4, 0, read_s=0.1), [FAST, FAST], None, "data"),
        (WORK, [FAST, FAST], Hardware({"a": Host(exchange=Exchange(bytes_per_s=1e6))}), "exchange"),
    ],
)
def test_the_limit_is_named(work: Workload, devices: list[Device], hardware: Hardware | None, limit: str):
    assert predict(work, devices, hardware).limit == limit


def test_a_device_nobody_has_is_given_by_a_factor():
    measured = Device("A", 0.1, rest_s=0.02, data_s=0.02, host="a", spread=0.03)
    half = measured.scaled("B", 0.5)
    assert half.micro_batch_s == pytest.approx(0.18)  # reading does not get slower
    assert half.rest_s == pytest.approx(0.04)
    assert (half.spread, half.uncertainty) == (0.03, FACTOR_ERROR)
    assert predict(WORK, [half]).high > (1 + FACTOR_ERROR) * predict(WORK, [half]).samples_per_s
    with pytest.raises(ValueError, match=r"factor=0 of B: choose how fast it is relative to A, such as 0\.4"):
        measured.scaled("B", 0)


def test_the_interval_widens_with_the_readings_spread():
    steady, noisy = (predict(WORK, [Device("d", 0.1, spread=spread)]) for spread in (0.0, 0.2))
    assert steady.high / steady.samples_per_s == pytest.approx(1 + MODEL_ERROR)
    assert noisy.low < steady.low < steady.samples_per_s < steady.high < noisy.high
    assert predict(WORK, [Device("d", 0.1, spread=1.5)]).low == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device("d", 0.0), r"d: micro_batch_s=0.0 must be a finite number of seconds > 0"),
        (lambda: Device("d", 0.1, rest_s=-1), r"d: rest_s=-1 must be a finite number >= 0"),
        (lambda: Workload(0, 4, 0), r"num_micro_batches=0: choose num_micro_batches >= 1"),
        (lambda: Link(0), r"a link's bytes_per_s=0 must be > 0"),
        (lambda: Link(1e9, -1.0), r"a link's latency_s=-1.0 must be >= 0"),
        (lambda: Exchange(bytes_per_s=0), r"an exchange's bytes_per_s=0 must be > 0"),
        (lambda: Workload(4, 4, 0, strategy="averaging"), r"strategy='averaging' is unknown: choose 'gradients', Cad"),
        (lambda: predict(WORK, []), r"devices is empty: give at least one device"),
        (lambda: predict(WORK, [FAST, Device("d", 1, host="b")]), r"hosts 'a', 'b' need a link.*--link 1Gbit"),
    ],
)
def test_bad_input(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_link_is_what_its_sums_take() -> None:
    link = Link(1e8, 0.001)
    fitted = Link.fitted(3, 4e6, link.seconds(3, 4e6), link.seconds(3, 0))
    assert (fitted.bytes_per_s, fitted.latency_s) == pytest.approx((1e8, 0.001))
