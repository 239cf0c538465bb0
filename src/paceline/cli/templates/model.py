"""The model, its loss and its metrics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def build_model(width: int) -> nn.Module:
    """Called once on every worker, after the random generators are seeded."""
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over the samples of the batch."""
    return F.cross_entropy(model(batch.x), batch.y)


def metrics(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Means over the samples of the batch, by name. They are averaged over all batches, weighted by size."""
    scores = model(batch.x)
    return {
        "loss": F.cross_entropy(scores, batch.y),
        "accuracy": (scores.argmax(dim=1) == batch.y).float().mean(),
    }
