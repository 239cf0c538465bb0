"""What a closed run leaves on a GPU for the next. CI has no GPU; run by hand where there is one."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import paceline as pl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 4096  # of one layer: 64 MiB of weights


def step_once() -> int:
    """Trains for one step with a trainer of its own. Returns what was allocated when its parts existed."""
    with pl.Trainer.setup(
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=torch.randn(8, WIDTH),
        device="cuda",
        global_batch=8,
        micro_batch=8,
        runtime=pl.Runtime(quiet=True),
    ) as trainer:
        allocated = torch.cuda.memory_allocated()
        step = trainer.step_with(lambda batch: trainer.model(batch).square().mean())
        for epoch in trainer.epochs(1):
            for batch in epoch:
                step(batch)
        return allocated


def test_a_closed_run_holds_no_memory_when_the_next_one_begins() -> None:
    step_once()  # cuBLAS allocates workspaces that stay
    gc.disable()  # so that only Paceline's own collection can free a run
    try:
        first, second = step_once(), step_once()
    finally:
        gc.enable()
    assert second < first + 2 * WIDTH * WIDTH  # half the bytes of the weights
