"""docs/contrastive.md on several workers: the results do not depend on them; gather inside the loop is explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from test_code_blocks import python_blocks
from worker_pool import WorkerPool

import paceline as pl

PAGE = Path(__file__).parents[2] / "docs" / "contrastive.md"
BLOCKS = python_blocks(PAGE.read_text())


def trained(name: str, shares: list[float]) -> tuple[float, str]:
    """What a function of the page comes to, in exact mode."""
    page: dict[str, Any] = {}
    for block in BLOCKS:
        lines = block.splitlines()
        # Definitions only: what the page runs, it runs on one worker.
        code = "\n".join(
            line for line in lines if not line.startswith(("loss", "print", "assert", "for one", "    torch.t"))
        )
        exec(code, page)
    settings = grouped(exact=True, shares=shares, timeout_s=60, quiet=True)
    if name == "train_with_queue":
        loss, state = page[name](**settings)
    else:
        loss, state = page["train"](page[name], **settings)
    return loss, digest(state)


@pytest.mark.parametrize("name", ["at_once", "in_two_passes", "train_with_queue"])
def test_the_page_has_the_same_result_on_any_number_of_workers(pool: WorkerPool, name: str) -> None:
    expected = trained(name, [1.0])
    assert pool.run(trained, 2, name, [1.0, 0.0]) == [expected] * 2
    assert pool.run(trained, 3, name, [0.0, 1.0, 2.0]) == [expected] * 3


@pytest.mark.parametrize("size", [1, 2])
def test_gather_inside_the_loop_names_what_to_do(pool: WorkerPool, size: int) -> None:
    def run() -> str:
        with (
            pl.Trainer.setup(
                mlp,
                lambda p: torch.optim.SGD(p, lr=0.1),
                data=vectors(16),
                global_batch=8,
                micro_batch=4,
                runtime=pl.Runtime(timeout_s=60),
            ) as trainer,
        ):
            for batch in next(trainer.epochs(1)):
                with pytest.raises(pl.errors.MisuseError) as raised:
                    trainer.gather(trainer.model(batch.x))
                trainer.backward(trainer.model(batch.x).square().mean())
                trainer.step()
        return str(raised.value)

    for text in pool.run(run, size) if size > 1 else [run()]:
        assert text.startswith("gather() was called inside an epoch's loop, which workers leave at different times")
        assert text.endswith("such as in-batch negatives, choose a larger micro_batch, or see docs/contrastive.md")
