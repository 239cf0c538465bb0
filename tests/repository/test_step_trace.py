"""The walk in CONTRIBUTING.md, "One step through the files", is the way a default step really takes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pl.__file__).parent
MAX_FILES, MAX_FUNCTIONS = 20, 100
TRACED_STEP = 12  # past the first steps, in which states are made and grids are calibrated


def traced_step() -> set[tuple[str, str]]:
    """The (file, function) pairs of Paceline that this worker enters in one step of the README's loop."""
    entered: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add((str(path.relative_to(PACKAGE)), frame.f_code.co_qualname))

    x = torch.randn(512, 8)
    with pl.Trainer.setup(
        lambda: nn.Linear(8, 3),
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        data=(x, torch.randint(3, (512,))),
        global_batch=16,
        micro_batch=4,
    ) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                is_traced = trainer.position.step == TRACED_STEP
                sys.setprofile(note if is_traced else None)
                loss = functional.cross_entropy(trainer.model(batch.x), batch.y)
                trainer.backward(loss)
                trainer.step()
            sys.setprofile(None)
    return entered


def test_a_default_step_enters_the_files_that_contributing_names(pool: WorkerPool) -> None:
    by_rank = pool.run(traced_step, 2)
    entered = set().union(*by_rank)
    files = {file for file, _ in entered}
    walk = (ROOT / "CONTRIBUTING.md").read_text().partition("## One step through the files")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", walk))
    assert files == named
    assert len(files) <= MAX_FILES
    assert len(entered) <= MAX_FUNCTIONS, sorted(entered)
