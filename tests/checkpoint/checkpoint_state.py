"""Small states for the tests of checkpoints, and whether two states are the same to the last bit."""

from __future__ import annotations

import math
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.manifest import Pattern
from paceline.checkpoint.pieces import Component
from paceline.checkpoint.saving import Job, save
from paceline.checkpoint.writer import AsyncWriter
from paceline.core.world import World


def state(seed: int = 0, size: int = 6) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(size, 4, generator=generator),
        "half": torch.randn(size, generator=generator).bfloat16(),
        "groups": [{"lr": 0.1 + seed, "betas": (0.9, 0.999)}],
        "state": {0: {"step": torch.tensor(float(seed))}},
    }


def components(seed: int = 0, rank: int = 0, size: int = 6) -> list[Component]:
    return [
        Component("model", {"weight": state(seed, size)["weight"], "bias": torch.full((3,), float(seed))}),
        Component("optimizer", state(seed + 1, size)),
        Component("rng", {"seed": seed, "rank": rank}, Pattern.PER_RANK),
    ]


def job(step: int, seed: int | None = None, **more: Any) -> Job:
    return Job(step, components(step if seed is None else seed, **more), {"lr": 0.1}, {"step": step})


def save_steps(root: Path, *steps: int) -> list[Path]:
    folders = [save(root, job(step)) for step in steps]
    return [folder for folder in folders if folder is not None]


def world(rank: int, size: int, local_rank: int | None = None, local_size: int | None = None) -> World:
    return World(rank, size, rank if local_rank is None else local_rank, size if local_size is None else local_size)


def settled(writer: AsyncWriter) -> AsyncWriter:
    """The writer, when what it writes is done or has failed and nobody was told yet."""
    assert writer._under_way is not None
    assert wait([writer._under_way], timeout=20).done
    return writer


def same(a: Any, b: Any) -> bool:
    """Equal in every type and bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        as_bytes = [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return same(list(a), list(b)) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.generic):
        return a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)
