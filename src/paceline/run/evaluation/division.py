"""Visiting every sample of some data once, divided among all workers; for evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.core.seeding import Purpose, derive_seed, seed_device
from paceline.core.settings import check_value
from paceline.data.adopt import adopt_for_evaluation
from paceline.data.epochs import seeded_epoch
from paceline.data.feeds.device import DeviceCopier
from paceline.data.feeds.sharded import reader_of
from paceline.data.sources.base import Read
from paceline.plan.shares import ranges, shares
from paceline.plan.steps import Steps

T = TypeVar("T")


class Division:
    """Data in micro-batches, in its own order; `mine` are the numbers of this worker's, which may be none.

    micro_batch: default, the batch size of a DataLoader, or `default_size`.
    """

    def __init__(
        self,
        data: Any,
        communicator: Communicator,
        seed: int,
        default_size: int,
        *,
        micro_batch: int | None = None,
        collate_fn: Any = None,
    ) -> None:
        self._source, batch_size = adopt_for_evaluation(data, collate_fn, seed)
        check_value("micro_batch", micro_batch, int | None, least=1)
        size = micro_batch or batch_size or default_size
        steps = Steps(len(self._source), size, size)
        self._epoch = seeded_epoch(0, steps, len(self._source), seed=seed, shuffle=False)
        self._seed = seed
        self.communicator = communicator
        self.device = communicator.world.device
        self.to_device = DeviceCopier(self.device)
        self.mine = ranges(shares(steps.num_micro_batches, (1.0,) * communicator.world.size))[communicator.world.rank]

    @torch.no_grad()
    def visit(self, model: Any, numbers: range, handle: Callable[[Read], T], *, is_weighed: bool) -> list[T]:
        """The results of `handle(read)` for these micro-batches, which are on the host; `read.batch` may be None.

        The model is in evaluation mode. Random numbers are seeded per micro-batch; torch's generators are restored.
        is_weighed: `handle` does not need the number of samples.
        """
        read_request = reader_of(self._source, is_weighed=is_weighed)
        handled = []
        with kept_modes(model) as modules, torch.random.fork_rng([self.device] * (self.device.type == "cuda")):
            for module in modules:
                module.training = False
            for number in numbers:
                read = read_request(self._epoch.request(number, 1))
                if read.batch is None and read.skipped:
                    raise ValueError(
                        f"all samples of the evaluation's micro-batch {number} are bad: {read.skipped[0].error}"
                    )
                seed_device(self.device, derive_seed(self._seed, Purpose.EVALUATION, number))
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
