"""Random numbers that belong to the work, not to the worker.

Every seed is a hash of what the numbers are for: (seed, step, micro-batch) for a forward pass,
(seed, epoch, sample) for an augmentation. No seed depends on a rank or on what ran before.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch

from paceline.core.mixing import MASK, mix64, mix64_each

# Of how many steps the seeds are computed at once.
STEPS_AHEAD = 64


class Purpose(enum.IntEnum):
    """Keeps the streams of different uses apart."""

    MODEL_INIT = 1
    MICRO_BATCH = 2
    AFTER_STEP = 3
    EVALUATION = 4
    SAMPLE = 5
    SAMPLE_BLOCK = 6
    SHUFFLE_BUFFER = 7
    ORDER = 8


def derive_seed(seed: int, purpose: Purpose, *numbers: int) -> int:
    """A 63-bit seed for one use, from the run's seed and the numbers that name the use."""
    return _derived(_stream(seed, purpose), numbers)


def _derived(stream: int, numbers: tuple[int, ...]) -> int:
    for number in numbers:
        stream = mix64(stream ^ (number & MASK))
    return stream >> 1


@lru_cache(maxsize=64)
def _stream(seed: int, purpose: Purpose) -> int:
    return mix64(mix64(seed & MASK) ^ int(purpose))


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generators a forward pass may draw from: the device's, and the CPU's for host-side draws.

    Only these two, directly: `torch.manual_seed` visits every backend and costs a hundred times as much.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


class StepSeeding:
    """`seed_device` for one purpose in one step after another: a small model's step feels how long a seed takes.

    Called with the step and numbers of a use within it. Where the numbers stay the same, the seeds of many steps are
    computed at once.
    """

    def __init__(self, device: torch.device, seed: int, purpose: Purpose) -> None:
        self._device = device
        self._stream = _stream(seed, purpose)
        self._generators = [torch.default_generator.manual_seed]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0].manual_seed)
        self._numbers: tuple[int, ...] | None = None  # of the last use
        self._first = 0
        self._seeds: list[int] = []  # from step `_first` on

    def __call__(self, step: int, *numbers: int) -> None:
        """Seed for the use that these numbers name."""
        place = step - self._first
        if numbers == self._numbers and 0 <= place < len(self._seeds):
            seed = self._seeds[place]
        else:
            seed = self._derived(step, numbers)
        for manual_seed in self._generators:
            manual_seed(seed)

    def _derived(self, step: int, numbers: tuple[int, ...]) -> int:
        if numbers != self._numbers:  # several uses in turn: none comes often enough
            self._numbers, self._seeds = numbers, []
            return _derived(self._stream, (step, *numbers))
        self._first = step
        self._seeds = self._derived_ahead(step, numbers)
        return self._seeds[0]

    def _derived_ahead(self, step: int, numbers: tuple[int, ...]) -> list[int]:
        streams = mix64_each(np.arange(step, step + STEPS_AHEAD, dtype=np.uint64) ^ np.uint64(self._stream))
        for number in numbers:
            streams = mix64_each(streams ^ np.uint64(number & MASK))
        seeds: list[int] = (streams >> np.uint64(1)).tolist()
        return seeds


class HostRandomness:
    """Seeds Python's, NumPy's and torch's CPU generators while samples are read."""

    def seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)


@contextmanager
def host_randomness() -> Iterator[HostRandomness]:
    """Reading in this process: whatever the block draws, the user's own random streams go on undisturbed."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        yield HostRandomness()
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
