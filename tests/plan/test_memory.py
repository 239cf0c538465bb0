"""The memory of a worker, by the settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.plan.memory import MemoryReport, StateSize, gigabytes, memory_of

DOCS = Path(__file__).parents[2] / "docs" / "memory.md"
MODELS = {"124M": 124_000_000, "1.3B": 1_300_000_000, "7B": 7_000_000_000}
DEVICES_GB = (8, 24, 80)
# The fraction of a device's memory for a run's state; the rest is for the framework and the smallest activations.
USABLE = 0.85


def table() -> list[str]:
    """The table of docs/memory.md: what fits on one of several devices, with AdamW."""
    lines = [
        "| parameters | workers | weights | whole state | divided state | fits on |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, count in MODELS.items():
        for workers in (1, 2, 4, 8):
            for weight, label in ((4, "float32"), (2, "bf16, float32 masters")):
                size = StateSize(count, weight, num_workers=workers, master_weights=weight == 2)
                whole, divided = memory_of(size), memory_of(replace(size, shard="optimizer"))
                best = divided if workers > 1 else whole
                fits = [f"{gb} GB" for gb in DEVICES_GB if best.total <= USABLE * gb * 1e9]
                lines.append(
                    f"| {name} | {workers} | {label} | {gigabytes(whole.total)} | "
                    f"{gigabytes(divided.total) if workers > 1 else '-'} | {', '.join(fits) or 'none'} |"
                )
    return lines


def test_the_table_of_the_docs_is_what_the_code_computes() -> None:
    text = DOCS.read_text()
    assert text.endswith("\n".join(table()) + "\n")


# settings, then bytes per parameter of weights, gradients, sums, optimizer
PER_PARAMETER = [
    ({}, (4, 4, 0, 8)),
    ({"num_workers": 2}, (4, 4, 4, 8)),
    ({"micro_batches": 2}, (4, 4, 4, 8)),
    ({"num_workers": 2, "exact": True}, (4, 4, 12, 8)),
    ({"fp16": True}, (4, 4, 4, 8)),
    ({"num_workers": 4, "shard": "optimizer"}, (4, 4, 1, 2)),
    ({"num_workers": 4, "shard": "optimizer", "share": 0.5}, (4, 4, 2, 4)),
    ({"num_workers": 4, "shard": "optimizer", "redundancy": 2}, (4, 4, 2, 4)),
    ({"num_workers": 4, "shard": "optimizer", "exact": True}, (4, 4, 3, 2)),
    ({"num_workers": 4, "shard": "optimizer", "micro_batches": 3}, (4, 4, 4, 2)),
    ({"num_workers": 4, "shard": "optimizer", "micro_batches": 3, "redundancy": 2}, (4, 4, 5, 4)),
    ({"num_workers": 4, "shard": "gradients", "micro_batches": 3}, (4, 4, 1, 2)),
    ({"num_workers": 4, "shard": "optimizer", "parameter_bytes": 2, "master_weights": True}, (2, 2, 1, 3)),
]


@pytest.mark.parametrize(("settings", "expected"), PER_PARAMETER)
def test_bytes_per_parameter(settings: dict[str, object], expected: tuple[float, ...]) -> None:
    count = 1_000_000
    report = memory_of(StateSize(count, **settings))  # type: ignore[arg-type]
    found = (report.weights, report.gradients, report.sums, report.optimizer)
    assert tuple(each / count for each in found) == expected
    assert (report.exchange > 0) == ("shard" in settings)


def test_averages_are_divided_too() -> None:
    assert memory_of(StateSize(1_000_000, num_workers=4, ema=True)).ema == 4_000_000
    assert memory_of(StateSize(1_000_000, num_workers=4, ema=True, shard="optimizer")).ema == 1_000_000


def test_the_text_names_every_part() -> None:
    report = MemoryReport(10**9, 10**9, 2 * 10**9, 4 * 10**9, 5 * 10**6)
    assert str(report) == (
        "8.0 GB per worker: weights 1.0 GB, gradients 1.0 GB, sums 2.0 GB, optimizer 4.0 GB, exchange 5 MB; "
        "activations come on top"
    )
    assert str(report.with_activations(10**10)).endswith("activations 2.0 GB")
    assert report.with_activations(0).activations == 0
