"""The memory report of a run: what its optimizer keeps, and which sums it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.plan.memory import MemoryReport
from paceline.run.settings import Precision
from paceline.sync.gradients.direct import DirectGradients

COUNT = 100 * 100  # parameters


def report_of(optimizer: Callable[..., Any], precision: Precision = "fp32") -> tuple[MemoryReport, bool]:
    """The report, and whether the run keeps no sums of gradients."""
    with pl.Trainer.setup(
        lambda: torch.nn.Linear(100, 100, bias=False),
        optimizer,
        data=torch.randn(8, 100),
        global_batch=8,
        precision=precision,
        runtime=pl.Runtime(quiet=True),
    ) as trainer:
        return trainer.memory_report(), isinstance(trainer.run.loop.exchange, DirectGradients)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (torch.optim.SGD, 0),
        (lambda p: torch.optim.SGD(p, momentum=0.9), 4),
        (torch.optim.AdamW, 8),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 12),
        (lambda p: torch.optim.AdamW(p, capturable=True), 8),  # whose steps need a GPU
    ],
)
def test_an_optimizers_bytes_per_parameter(optimizer: Callable[..., Any], expected: int) -> None:
    report, _ = report_of(optimizer)
    assert report.optimizer == expected * COUNT


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_worker_that_sums_nothing_needs_no_sums(precision: Precision) -> None:
    report, is_direct = report_of(torch.optim.SGD, precision)
    assert (report.sums == 0) == is_direct
    assert report.sums == (4 * COUNT if precision == "fp16" else 0)
