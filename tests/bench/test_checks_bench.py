"""`bench checks`: what is taken out is what is measured."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import nn

import paceline as pl
from bench import checks

X = torch.randn(16, 6)


def test_without_checks_nothing_is_noticed() -> None:
    def clipped(*, is_checked: bool) -> int:
        with pl.Trainer.setup(nn.Linear(6, 1), lambda p: torch.optim.SGD(p, 0.1), data=X, global_batch=8) as trainer:
            if not is_checked:
                checks.without_checks(trainer)
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    trainer.backward(trainer.model(batch).square().mean())
                    nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1)
                    trainer.step()
            return trainer.position.step

    assert clipped(is_checked=False) == 2
    with pytest.raises(pl.errors.MisuseError, match="was changed between"):
        clipped(is_checked=True)


def test_a_short_run_of_one_worker() -> None:
    parts = checks.run(argparse.Namespace(turns=1, part=["overhead"]))
    assert set(parts.results["overhead"].detail["spread"]) == {checks.CHECKED, checks.UNCHECKED}
    assert "of the step without checks" in parts.table()
