"""A small task for the ported programs: points of three classes. Not an example by itself."""

from __future__ import annotations

import torch
from torch import nn


def make_points(count: int = 256, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, float32 of shape (count, 8), and their classes, int64 of shape (count,)."""
    generator = torch.Generator().manual_seed(seed)
    centers = 2 * torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(3, (count,), generator=generator)
    return centers[labels] + torch.randn(count, 8, generator=generator), labels


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))


def accuracy(model: nn.Module) -> float:
    """Of a trained model, on points that it has not seen."""
    points, labels = make_points(seed=2)
    model.eval().cpu()
    with torch.no_grad():
        return (model(points).argmax(1) == labels).float().mean().item()
