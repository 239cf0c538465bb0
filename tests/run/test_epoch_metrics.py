"""Metrics of an epoch: what counts once, however often it was computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grouping import grouped
from models import mlp, vectors
from torch.nn import functional

import paceline as pl
from paceline.run.epoch_metrics import Tally


def test_an_abandoned_attempt_at_a_step_does_not_count() -> None:
    settings = grouped(global_batch=8, micro_batch=2, physical_batch=4, quiet=True)
    optimizer = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    with pl.Trainer.setup(mlp, optimizer, data=vectors(8), **settings) as trainer:
        tally, loop = Tally(trainer.run), trainer.run.loop
        trainer.every(1, tally.add)
        for epoch in trainer.epochs(1):
            tally.begin()
            tally.note({"rows": 100.0}, 4)  # then a worker was lost, and all begin the step again
            loop.open.step = loop.open.step._replace()
            for batch in epoch:
                tally.note({"rows": len(batch.x)}, loop.open.weight)
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
            assert tally.end(0).scalars == {"rows": 4.0}


@pytest.mark.parametrize("value", [1j, torch.tensor(1j), torch.zeros(2), "1"])
def test_a_mean_is_one_real_number(value: Any) -> None:
    with pl.Trainer.setup(mlp, torch.optim.SGD, data=vectors(8), **grouped(global_batch=8, quiet=True)) as trainer:
        with pytest.raises(ValueError, match=r"train_fn returned .* as 'x': it must be one number"):
            Tally(trainer.run).note({"x": value}, 1)
        with pytest.raises(ValueError, match=r"eval_fn returned .*: it must return one number"):
            trainer.evaluate(vectors(8), lambda *_: value)
