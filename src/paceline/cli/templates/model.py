"""The model, its loss, and what an evaluation tells about it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def build_model(width: int) -> nn.Module:
    """Called once on every worker, with the random generators seeded."""
    return nn.Sequential(
        nn.Linear(2, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 3),
    )


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """A mean over the batch's samples."""
    return F.cross_entropy(model(batch.x), batch.y)


def metrics(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Means over the batch's samples, by name; they are put together over all batches, each counted by its size."""
    scores = model(batch.x)
    return {
        "loss": F.cross_entropy(scores, batch.y),
        "accuracy": (scores.argmax(dim=1) == batch.y).float().mean(),
    }
