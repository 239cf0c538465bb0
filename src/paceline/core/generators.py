"""The random generators that samples and models draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The generators that a forward pass may use: the CPU's and the device's."""
    own = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *own]


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generators of a forward pass. `torch.manual_seed` would seed every backend and take much longer."""
    for generator in generators_of(device):
        generator.manual_seed(seed)


class HostRandomness:
    """Seeds the generators of Python, NumPy and torch on the CPU while samples are read."""

    def seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)


@contextmanager
def host_randomness() -> Iterator[HostRandomness]:
    """Restores the user's random states at the end of the block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        yield HostRandomness()
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
