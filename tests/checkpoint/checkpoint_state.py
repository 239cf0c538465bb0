"""Small states for the tests of checkpoints, and saving without a run."""

from __future__ import annotations

from concurrent.futures import wait
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from bitwise import same as same

from paceline.checkpoint.folders import step_folder
from paceline.checkpoint.manifest import Manifest, Pattern
from paceline.checkpoint.writer import AsyncWriter, Component
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


Job = tuple[Manifest, list[Component]]


def job(step: int, seed: int | None = None, **more: Any) -> Job:
    """The arguments of `AsyncWriter.save`."""
    manifest = Manifest(step, configuration={"lr": 0.1}, position={"step": step})
    return manifest, components(step if seed is None else seed, **more)


def save(root: Path, saved: Job, each: World | None = None, **options: Any) -> Path:
    """Save and wait for it. In a world of several, each worker calls it in a thread of its own."""
    with closing(AsyncWriter(root, each or World(), **options)) as writer:
        writer.save(*saved)
    return step_folder(root, saved[0].step)


def save_steps(root: Path, *steps: int) -> list[Path]:
    return [save(root, job(step)) for step in steps]


def world(rank: int, size: int, local_rank: int | None = None, local_size: int | None = None) -> World:
    return World(rank, size, rank if local_rank is None else local_rank, size if local_size is None else local_size)


def settled(writer: AsyncWriter) -> AsyncWriter:
    """The writer, when its save is done or has failed and nothing was reported yet."""
    assert writer.pending is not None
    assert wait([writer.pending], timeout=20).done
    return writer
