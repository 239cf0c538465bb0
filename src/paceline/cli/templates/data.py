"""The data: points on three spirals, labelled with the number of the spiral. Replace it by your own."""

from __future__ import annotations

import math

import torch

NUM_SPIRALS = 3


def spirals(count: int, seed: int, noise: float = 0.02) -> tuple[torch.Tensor, torch.Tensor]:
    """Points (count, 2) and labels (count,). With a tuple of two tensors, batches have `.x` and `.y`.

    A list, a torch Dataset, an Arrow file or a stream works as well. The data must be the same in every worker, so
    random numbers are generated from a seed.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_SPIRALS, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 2 * math.pi * (radius + labels / NUM_SPIRALS)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return points + noise * torch.randn(count, 2, generator=generator), labels
