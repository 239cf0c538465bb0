"""Predictions against figures that others have published; sources and data are in tests/plan/published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.plan.predict import Averaging, Device, Exchange, Hardware, Host, Workload, predict

FOLDER = Path(__file__).parent / "published"
TIMM: dict[str, Any] = json.loads((FOLDER / "timm_580.json").read_text())
FLODL: dict[str, Any] = json.loads((FOLDER / "flodl_ddp_benchmark.json").read_text())


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
