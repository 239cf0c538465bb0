"""Random numbers that belong to the work, not to the worker.

Every seed is a hash of the numbers that identify its use: (seed, step, micro-batch) for a forward pass, (seed, epoch,
sample) for an augmentation. No seed depends on a rank or on earlier draws.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch

from paceline.core.mixing import MASK, mix64


class Purpose(enum.IntEnum):
    """Separates the streams of different uses."""

    MODEL_INIT = 1
    MICRO_BATCH = 2
    AFTER_STEP = 3
    EVALUATION = 4
    SAMPLE = 5
    SAMPLE_BLOCK = 6
    SHUFFLE_BUFFER = 7
    ORDER = 8


def derive_seed(seed: int, purpose: Purpose, *numbers: int) -> int:
    """A 63-bit seed for one use, from the run's seed and the numbers that identify the use."""
    state = _stream(seed, purpose)
    for number in numbers:
        state = mix64(state ^ (number & MASK))
    return state >> 1


@lru_cache(maxsize=64)
def _stream(seed: int, purpose: Purpose) -> int:
    return mix64(mix64(seed & MASK) ^ int(purpose))


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generators that a forward pass may use: the device's and the CPU's.

    `torch.manual_seed` would seed every backend and take a hundred times as long.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


class StepSeeding:
    """Seeds the device for one purpose in every step."""

    def __init__(self, device: torch.device, seed: int, purpose: Purpose) -> None:
        self._device = device
        self._stream = _stream(seed, purpose)

    def __call__(self, *numbers: int) -> None:
        """Seed for the use that step and micro-batch identify, as `derive_seed`."""
        state = self._stream
        for number in numbers:
            state = mix64(state ^ number)
        seed_device(self._device, state >> 1)


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
