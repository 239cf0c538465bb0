"""One small training run, for tests that change everything around it."""

from __future__ import annotations

from typing import Any

import torch
from grouping import grouped
from models import digest, mlp
from torch.nn import functional

import paceline as pl


def train(data: Any, **settings: Any) -> tuple[str, list[float]]:
    """A digest of the weights after two epochs in exact mode, and what each step weighed."""
    weights: list[float] = []
    settings = {"exact": True, **settings}
    with pl.Trainer.setup(mlp, lambda p: torch.optim.SGD(p, lr=0.1), data=data, **grouped(**settings)) as trainer:
        trainer.every(1, lambda record: weights.append(record.weight))
        for epoch in trainer.epochs(2):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        return digest(trainer.model.state_dict()), weights
