"""Optimizers and schedulers in all the forms users bring them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

X, Y = vectors(40)
StepLR = torch.optim.lr_scheduler.StepLR


def seeded_mlp() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def train(trainer: pl.Trainer, epochs: int = 2) -> list[pl.StepRecord]:
    records: list[pl.StepRecord] = []
    trainer.every(1, records.append)
    for epoch in trainer.epochs(epochs):
        for batch in epoch:
            trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
            trainer.step()
    return records


def setup(model: Any, optimizer: Any, **settings: Any) -> pl.Trainer:
    return pl.Trainer.setup(
        model, optimizer, **grouped(**{"data": (X, Y), "global_batch": 8, "micro_batch": 4, **settings})
    )


def two(parameters: list[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Matrices by one rule, vectors by another."""
    matrices, rest = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


def test_an_optimizer_that_exists_is_taken_as_it_is() -> None:
    def run(build: Any) -> str:
        model = seeded_mlp()
        with setup(model, build(model)) as trainer:
            train(trainer)
            return digest(model.state_dict())

    def exists(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    assert run(exists) == run(lambda _: lambda p: torch.optim.AdamW(p, lr=0.01))


def test_several_optimizers_step_together(pool: WorkerPool) -> None:
    def run() -> str:
        with setup(mlp, two, exact=True, scheduler=lambda all: [StepLR(o, 3, 0.5) for o in all]) as trainer:
            records = train(trainer)
            assert len(trainer.optimizer) == len(trainer.scheduler) == 2
            assert [o.param_groups[0]["lr"] for o in trainer.optimizer] == pytest.approx([0.1 / 8, 0.01 / 8])
            assert records[-1].lr == pytest.approx(0.1 / 8)
            return digest(trainer.model.state_dict(), *(o.state_dict() for o in trainer.optimizer))

    alone = run()
    assert pool.run(run, 2) == [alone, alone]


def test_several_optimizers_are_resumed(tmp_path: Path) -> None:
    def run(folder: Path, epochs: int) -> str:
        with setup(
            mlp, two, checkpoints=pl.Checkpoints(folder), scheduler=lambda all: [StepLR(o, 3, 0.5) for o in all]
        ) as trainer:
            train(trainer, epochs)
            states = [o.state_dict() for o in [*trainer.optimizer, *trainer.scheduler]]
            return digest(trainer.model.state_dict(), *states)

    run(tmp_path / "cut", 1)
    assert run(tmp_path / "cut", 3) == run(tmp_path / "whole", 3)
    with pytest.raises(pl.errors.CheckpointError, match=r"optimizer: 'SGD, AdamW' in the checkpoint, 'SGD' now"):
        setup(mlp, lambda p: torch.optim.SGD(p, lr=0.1), checkpoints=pl.Checkpoints(tmp_path / "cut"))


def test_a_scheduler_may_step_at_the_end_of_epochs(tmp_path: Path, pool: WorkerPool) -> None:
    def run(epochs: int = 3, **settings: Any) -> list[float]:
        with setup(
            mlp, lambda p: torch.optim.SGD(p, lr=1.0), scheduler=lambda o: StepLR(o, 1, 0.5), scheduler_every="epoch",
            **settings,
        ) as trainer:  # fmt: skip
            return [record.lr for record in train(trainer, epochs)] + [trainer.optimizer.param_groups[0]["lr"]]

    expected = [1.0] * 5 + [0.5] * 5 + [0.25] * 5 + [0.125]
    assert run() == expected
    assert pool.run(run, 2) == [expected, expected]
    # A checkpoint at an epoch's last step holds the rate of the next epoch.
    run(1, checkpoints=pl.Checkpoints(tmp_path / "run", every_steps=5))
    assert run(checkpoints=pl.Checkpoints(tmp_path / "run")) == expected[5:]


def test_the_end_of_an_epoch_counts_also_for_a_stream() -> None:
    with setup(
        mlp, lambda p: torch.optim.SGD(p, lr=1.0), data=pl.Batches([(X[:8], Y[:8])] * 3), global_batch=None,
        micro_batch=None, batches_per_step=2, scheduler=lambda o: StepLR(o, 1, 0.5), scheduler_every="epoch",
    ) as trainer:  # fmt: skip
        assert [record.lr for record in train(trainer, 2)] == [1.0] * 2 + [0.5] * 2
        assert trainer.optimizer.param_groups[0]["lr"] == 0.25


def test_an_optimizer_over_foreign_parameters_is_refused() -> None:
    text = r"a parameter of shape \(32, 12\) in group 0 of the SGD optimizer is not one of the model's"
    with pytest.raises(pl.errors.MisuseError, match=text):
        setup(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1))
    with pytest.raises(pl.errors.MisuseError, match=text):
        setup(mlp, torch.optim.SGD(mlp().parameters(), lr=0.1))  # the model is built later: it cannot be over that


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"optimizer made a dict: pass a function"):
        setup(mlp, lambda _: {"lr": 0.1})
    with pytest.raises(ValueError, match="optimizer is an empty list"):
        setup(mlp, lambda _: [])
    with pytest.raises(ValueError, match="scheduler_every='month' is unknown: choose 'step' or 'epoch'"):
        setup(mlp, two, scheduler_every="month")


def test_a_plateau_scheduler_cannot_step_by_epochs() -> None:
    """An error of the set-up: an epoch may take a day."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(pl.errors.MisuseError, match="ReduceLROnPlateau needs a value at the end of an epoch"):
        setup(mlp, lambda p: torch.optim.SGD(p, lr=1.0), scheduler=plateau, scheduler_every="epoch")
