"""What the tests of the functional interface share: small data, and a step in one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from grouping import grouped
from models import digest, images, mlp, vectors
from torch.nn import functional
from torch.utils.data import IterableDataset

import paceline as pl

X, Y = vectors(50)
IMAGES, LABELS = images(12)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return ((X[i], int(Y[i])) for i in range(10))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=3e-3)


def prepare(
    model: Any = mlp, data: Any = (X, Y), replicas: int = 2, optimizer: Any = sgd, nsamples: Any = 4, **settings: Any
) -> pl.compat.resnetimagenet.TrainingState:
    return pl.compat.resnetimagenet.prepare_training(
        model, data, ["cpu"] * replicas, optimizer, nsamples, **grouped(**settings)
    )


def one_step(state: pl.compat.resnetimagenet.TrainingState, batches: tuple[Any, ...], **settings: Any) -> None:
    for replica, batch in enumerate(batches):
        pl.compat.resnetimagenet.train_step(functional.cross_entropy, state, batch, replica)
    pl.compat.resnetimagenet.sync_buffer(state, **settings)
    pl.compat.resnetimagenet.update(state)


def everything(state: pl.compat.resnetimagenet.TrainingState) -> list[str]:
    """A digest of each replica's weights, buffers and optimizer."""
    return [digest(m.state_dict(), o.state_dict()) for m, o in zip(state.models, state.optimizers, strict=True)]
