"""A run that can be stopped anywhere, and all that must be the same when it goes on: for the tests of resuming.

Shuffle, dropout, BatchNorm (by momentum and as a running average), AdamW, a schedule, clipping, an average of the
weights that the user keeps, and draws from Python's and NumPy's generators between the steps.
"""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grouping import grouped
from models import digest, images
from torch import nn
from torch.nn import functional

import paceline as pl
from paceline.checkpoint.run_folder import memory_folder

# Ten full steps of four micro-batches of four, and one of two: 11 steps in an epoch.
NUM_SAMPLES = 167
EPOCHS = 2
NUM_STEPS = 22


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Conv2d(6, 8, 3, bias=False),
        nn.BatchNorm2d(8, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 5),
    )


class Average:
    """What a user might keep beside the model: an average of its weights, and a record of draws."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.draws: list[float] = []

    @torch.no_grad()
    def update(self) -> None:
        for name, parameter in self._model.named_parameters():
            self.weights[name].lerp_(parameter, 0.1)
        self.draws += [random.random(), float(np.random.rand())]

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, weight in state["weights"].items():
            self.weights[name].copy_(weight)  # which comes from the disk, to wherever the model is
        self.draws = state["draws"]


def setup(root: Path | None, **settings: Any) -> pl.Trainer:
    saving = {name: settings.pop(name) for name in list(settings) if name in pl.Checkpoints.__dataclass_fields__}
    settings = {"exact": True, "global_batch": 16, "micro_batch": 4, "max_grad_norm": 0.5, "seed": 5} | settings
    return pl.Trainer.setup(
        settings.pop("model", build),
        settings.pop("optimizer", lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)),
        data=settings.pop("data", images(NUM_SAMPLES)),
        scheduler=settings.pop("scheduler", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, NUM_STEPS)),
        **grouped(checkpoints=None if root is None else pl.Checkpoints(root, **saving), **settings),
    )


def snapshots_of(root: Path) -> list[Path]:
    """What there is in memory for this folder, whichever run it is of."""
    place = memory_folder(root, "").name
    return sorted(Path("/dev/shm").glob(f"{place}*/step-*"))


def step(trainer: pl.Trainer, batch: Any) -> pl.StepRecord | None:
    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
    return trainer.step()


def run(root: Path | None, until: int | None = None, *, epochs: int = EPOCHS, **settings: Any) -> str:
    """Train to the end, or `until` so many steps are done; the digest of everything a run has."""
    random.seed(3)
    np.random.seed(4)
    with setup(root, **settings) as trainer:
        average = Average(trainer.model)
        if root is not None:
            trainer.register("average", average)
        trainer.every(1, lambda _: average.update())
        if until is not None:
            trainer.every(1, lambda record: trainer.request_stop() if record.step == until - 1 else None)
        with suppress(pl.errors.Stopped):
            for epoch in trainer.epochs(epochs):
                for batch in epoch:
                    step(trainer, batch)
        states = (trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.scheduler.state_dict())
        return digest(*states, average.state_dict(), trainer.position.to_dict())
