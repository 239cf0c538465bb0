"""The walk in CONTRIBUTING.md, "One step through the files", is the way a default step really takes."""

from __future__ import annotations

import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl
from paceline.run.step import planner

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pl.__file__).parent
MAX_FILES, MAX_FUNCTIONS = 20, 100
# Entered by a worker that waits long for another one: how long depends on what else this machine does.
WAITING = (
    "LocalPeers.lost",
    "Futex.sleep",
    "Futex.value",
    "ActiveTimer.__init__",
    "ActiveTimer.reset",
    "ActiveTimer.update",
)
# Past the first steps, in which states are made, and before the replicas are compared.
TRACED_STEPS = range(12, 92)


def traced_steps() -> list[set[tuple[str, str]]]:
    """By step: the (file, function) pairs of Paceline that this worker enters in the README's loop."""
    # As in steps of more than 10 ms, each of which updates the speeds. Restored: tests share the pool's workers.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "OBSERVE_EVERY_S", 1e-9)
        return _traced_steps()


def _traced_steps() -> list[set[tuple[str, str]]]:
    entered: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        name = frame.f_code.co_qualname
        if event == "call" and path.is_relative_to(PACKAGE) and name not in WAITING:
            entered.add((str(path.relative_to(PACKAGE)), name))

    x = torch.randn(4096, 8)
    by_step: dict[int, set[tuple[str, str]]] = {}
    with pl.Trainer.setup(
        lambda: nn.Linear(8, 3),
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        data=(x, torch.randint(3, (4096,))),
        global_batch=16,
        micro_batch=4,
    ) as trainer:
        for epoch in trainer.epochs(max_steps=TRACED_STEPS.stop):
            for batch in epoch:
                sys.setprofile(None)
                step = trainer.position.step
                if step - 1 in TRACED_STEPS:
                    by_step.setdefault(step - 1, set()).update(entered)
                    entered.clear()
                if step in TRACED_STEPS:
                    sys.setprofile(note)
                loss = functional.cross_entropy(trainer.model(batch.x), batch.y)
                trainer.backward(loss)
                trainer.step()
            sys.setprofile(None)
    return list(by_step.values())


def test_a_default_step_enters_the_files_that_contributing_names(pool: WorkerPool) -> None:
    steps = [step for worker in pool.run(traced_steps, 2) for step in worker]
    counts = Counter(file for step in steps for file in {file for file, _ in step})
    files = {file for file, count in counts.items() if count > len(steps) / 2}
    walk = (ROOT / "CONTRIBUTING.md").read_text().partition("## One step through the files")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", walk))
    assert files == named
    assert len(files) <= MAX_FILES
    # Without those in which speeds seem to change, as on a machine that is busy with something else: a worker then gets
    # no share, or shares are computed again.
    usual = [step for step in steps if not {"_with_idle", "_shares"} & {function for _, function in step}]
    assert statistics.median(len(step) for step in usual) <= MAX_FUNCTIONS
