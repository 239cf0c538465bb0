"""Visiting every sample of some data once, over all workers: how evaluation and prediction divide their work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.core.seeding import Purpose, derive_seed, seed_device
from paceline.core.world import World
from paceline.data.epochs import seeded_epoch
from paceline.data.feeds.sharded import reader_of
from paceline.data.sources.base import Read, Source
from paceline.plan.shares import ranges, shares
from paceline.plan.steps import Steps

T = TypeVar("T")


class Division:
    """Micro-batches in the data's order; `mine` are this worker's, which may be none.

    `function` is what the user calls the function that gets them. `is_weighed`: nobody asks how many samples they hold.
    """

    def __init__(
        self, source: Source, micro_batch: int, world: World, *, seed: int, function: str, is_weighed: bool
    ) -> None:
        if not isinstance(micro_batch, int) or micro_batch < 1:
            raise ValueError(
                f"micro_batch={micro_batch!r}: choose how many samples {function} gets at once, at least 1"
            )
        steps = Steps(len(source), micro_batch, micro_batch)
        self._epoch = seeded_epoch(0, steps, len(source), seed=seed, shuffle=False)
        self._read = reader_of(source, is_weighed=is_weighed)
        self._device = world.device
        self._seed = seed
        self.num_micro_batches = steps.num_micro_batches
        self.mine = ranges(shares(steps.num_micro_batches, (1.0,) * world.size))[world.rank]

    @torch.no_grad()
    def visit(self, model: Any, numbers: range, handle: Callable[[Read], T]) -> list[T]:
        """`handle(read)` of each of these micro-batches, which are on the host; one may have no batch.

        The model is in evaluation mode meanwhile. Random numbers belong to the micro-batch, and torch's streams go on
        afterwards as if nothing had been drawn.
        """
        handled = []
        with _evaluation_mode(model), torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            for number in numbers:
                read = self._read(self._epoch.request(number, 1))
                if read.batch is None and read.skipped:
                    raise ValueError(
                        f"all samples of the evaluation's micro-batch {number} are bad: {read.skipped[0].error}"
                    )
                seed_device(self._device, derive_seed(self._seed, Purpose.EVALUATION, number))
                handled.append(handle(read))
        return handled


class _evaluation_mode:
    """Evaluation mode, and back to what each module was in."""

    def __init__(self, model: Any) -> None:
        self._modules = list(model.modules()) if isinstance(model, nn.Module) else []

    def __enter__(self) -> None:
        self._was_training = [module.training for module in self._modules]
        for module in self._modules:
            module.training = False

    def __exit__(self, *_: object) -> None:
        for module, was_training in zip(self._modules, self._was_training, strict=True):
            module.training = was_training
