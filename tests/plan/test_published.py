"""Predictions against figures that others have published; sources and data are in tests/plan/published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.plan.predict import Averaging, Device, Exchange, Hardware, Host, Link, Workload, predict

FOLDER = Path(__file__).parent / "published"
TIMM: dict[str, Any] = json.loads((FOLDER / "timm_580.json").read_text())
FLODL: dict[str, Any] = json.loads((FOLDER / "flodl_ddp_benchmark.json").read_text())
HIVEMIND: dict[str, Any] = json.loads((FOLDER / "hivemind_multi_cloud.json").read_text())


@pytest.mark.parametrize(("number", "shares"), [(0, (2, 2, 2, 2)), (1, (3, 3, 2, 2))])
def test_timm_580(number: int, shares: tuple[int, ...]) -> None:
    """Micro-batches of 100 images. The 2080 Ti's speed is that of the equal run, the A6000's 1.5 times as high."""
    equal = TIMM["figures"][0]
    step_s = 8 * 100 / equal["images_per_s"]
    old = Device("2080 Ti", step_s / 2)
    new = old.scaled("A6000", 1.5)
    devices = [*[new] * TIMM["counts"]["A6000"], *[old] * TIMM["counts"]["2080 Ti"]]
    figure = TIMM["figures"][number]
    predicted = predict(Workload(sum(shares), 100, 0), devices if number else [old] * 4)
    assert predicted.shares == shares
    assert predicted.samples_per_s == pytest.approx(figure["images_per_s"], rel=0.1)


def flodl_error(row: list[Any]) -> float:
    """Predicted over published duration of a run, less one."""
    _, fast_s, slow_s, _, total_s, num_averages, average_ms = row
    # The work in 1000 micro-batches of one step: shares follow the speeds, averages come beside.
    devices = [Device("5060 Ti", fast_s / 1000), Device("1060", slow_s / 1000)]
    exchange = Exchange(call_s=num_averages * average_ms / 1e3)
    work = Workload(1000, 1, 0, strategy=Averaging(every=1))
    return predict(work, devices, Hardware({"": Host(exchange=exchange)})).step_s / total_s - 1


@pytest.mark.parametrize(("model", "mode"), FLODL["predictable"]["rows"])
def test_flodl(model: str, mode: str) -> None:
    row = next(row for row in FLODL["rows"] if [row[0], row[3]] == [model, mode])
    assert abs(flodl_error(row)) <= 0.1


def test_the_rest_of_flodls_table_is_not_predictable() -> None:
    """A prediction that turns good would belong into the list above."""
    predictable = {tuple(names) for names in FLODL["predictable"]["rows"]}
    for row in FLODL["rows"]:
        assert (abs(flodl_error(row)) <= 0.1) == ((row[0], row[3]) in predictable), row


@pytest.mark.parametrize(
    ("model", "row"), [(name, row) for name, model in HIVEMIND["models"].items() for row in model["rows"]]
)
def test_hivemind_multi_cloud(model: str, row: dict[str, Any]) -> None:
    """An RTX 8000 with eight T4, and T4 of one zone and of two continents. See the file for what is fitted."""
    known, num_samples = HIVEMIND["models"][model], HIVEMIND["samples_per_step"]
    fitted_from = known["fitted_from"]
    gradient_bytes = 2 * known["parameters"]
    step_s = num_samples / fitted_from["samples_per_s"]
    averaging_s = step_s / (1 + fitted_from["granularity"])
    relative_speed = num_samples / (step_s - averaging_s) / 4 / known["alone"]["T4"]
    attained = 2 * 3 / 4 * gradient_bytes / averaging_s  # bytes per second in a ring of four

    devices = [
        Device(name, 32 / (relative_speed * samples_per_s), host=f"{name}-{number}")
        for name, samples_per_s in known["alone"].items()
        for number in range(row.get(name, 0))
    ]
    link = Link(min(attained, row["gbit"] * 1e9 / 8), row["ping_ms"] / 2e3)
    work = Workload(num_samples // 32, 32, gradient_bytes, overlap=False)
    predicted = predict(work, devices, Hardware(link=link))
    assert predicted.samples_per_s == pytest.approx(row["samples_per_s"], rel=0.1)
