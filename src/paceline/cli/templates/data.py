"""The data: points on three spirals, labelled with the index of their spiral. Replace it with your own."""

from __future__ import annotations

import math

import torch

NUM_SPIRALS = 3


def spirals(count: int, seed: int, noise: float = 0.02) -> tuple[torch.Tensor, torch.Tensor]:
    """Points (count, 2) and labels (count,). The batches of a pair of tensors have attributes `.x` and `.y`.

    A factory may also return a list, a torch Dataset, an Arrow file or a stream. It must return the same data on every
    worker, so random numbers need a fixed seed.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_SPIRALS, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 2 * math.pi * (radius + labels / NUM_SPIRALS)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return points + noise * torch.randn(count, 2, generator=generator), labels
