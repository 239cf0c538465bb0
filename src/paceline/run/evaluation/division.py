"""Visiting every sample of some data once, divided among all workers; for evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.core.generators import seed_device
from paceline.core.seeding import Purpose, derive_seed
from paceline.core.world import World
from paceline.data.epochs import seeded_epoch
from paceline.data.feeds.sharded import reader_of
from paceline.data.sources.base import Read, Source
from paceline.plan.shares import ranges, shares
from paceline.plan.steps import Steps

T = TypeVar("T")


class Division:
    """Micro-batches in the data's order; `mine` are this worker's, which may be none.

    function: the name of the user's function in errors. is_weighed: a weight_fn weighs the micro-batches, so that their
    samples are not counted.
    """

    def __init__(
        self, source: Source, micro_batch: int, world: World, *, seed: int, function: str, is_weighed: bool
    ) -> None:
        if not isinstance(micro_batch, int) or micro_batch < 1:
            raise ValueError(f"micro_batch={micro_batch!r}: choose the number of samples per call of {function}, >= 1")
        steps = Steps(len(source), micro_batch, micro_batch)
        self._epoch = seeded_epoch(0, steps, len(source), seed=seed, shuffle=False)
        self._read = reader_of(source, is_weighed=is_weighed)
        self._device = world.device
        self._seed = seed
        self.num_micro_batches = steps.num_micro_batches
        self.mine = ranges(shares(steps.num_micro_batches, (1.0,) * world.size))[world.rank]

    @torch.no_grad()
    def visit(self, model: Any, numbers: range, handle: Callable[[Read], T]) -> list[T]:
        """The results of `handle(read)` for these micro-batches, which are on the host; `read.batch` may be None.

        The model is in evaluation mode. Random numbers are seeded per micro-batch; torch's generators are restored.
        """
        handled = []
        with kept_modes(model) as modules, torch.random.fork_rng([self._device] * (self._device.type == "cuda")):
            for module in modules:
                module.training = False
            for number in numbers:
                read = self._read(self._epoch.request(number, 1))
                if read.batch is None and read.skipped:
                    raise ValueError(
                        f"all samples of the evaluation's micro-batch {number} are bad: {read.skipped[0].error}"
                    )
                seed_device(self._device, derive_seed(self._seed, Purpose.EVALUATION, number))
                handled.append(handle(read))
        return handled


@contextmanager
def kept_modes(model: Any) -> Iterator[list[nn.Module]]:
    """The modules of a model. At the end of the block each is in the training mode it was in."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    were_training = [module.training for module in modules]
    try:
        yield modules
    finally:
        for module, was_training in zip(modules, were_training, strict=True):
            module.training = was_training
