"""`ArrayLoader`: batches from arrays, for a custom loop or as `data` of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from paceline.core.errors import MisuseError
from paceline.data.epochs import seeded_epoch
from paceline.data.sources.base import Columns, Pair
from paceline.plan.epoch import Steps


class ArrayLoader:
    """Batches with .x and .y from arrays or tensors with one row per sample; .y is None without y.

    Iterate over it, or over `epoch()`, for the batches of one epoch; or call `next_batch` while `has_next`, and `reset`
    for the next epoch. Every epoch has all rows, in a new order if `shuffle`; the last batch may be smaller, unless
    `drop_last`. Passed as `data` to `Trainer.setup` it stands for its arrays, with batch_size as micro_batch.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        batch_size: int = 32,
        shuffle: bool = True,
        *,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        for name, values in (("x", x), ("y", y)):
            if not isinstance(values, torch.Tensor | np.ndarray) and not (name == "y" and values is None):
                raise TypeError(f"{name} is a {type(values).__name__}: give an array or tensor with one row per sample")
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r} must be an integer >= 1")
        self.columns = Columns(x if y is None else (x, y))
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        num_rows = len(self.columns)
        if not num_rows:
            raise ValueError("x has no rows: give at least one")
        if drop_last and batch_size > num_rows:
            raise ValueError(
                f"drop_last=True leaves no batch of {num_rows} rows with batch_size={batch_size}: choose "
                f"batch_size <= {num_rows} or drop_last=False"
            )
        self._has_y = y is not None
        self._seed = seed
        self._steps = Steps(num_rows, batch_size, batch_size, drop_last)
        self._num_begun = 0
        self.reset()

    @property
    def n_batches(self) -> int:
        """Batches of an epoch."""
        return self._steps.num_steps

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[Pair]:
        return self.epoch()

    def epoch(self) -> Iterator[Pair]:
        """The batches of the next epoch, independent of `next_batch`."""
        number, self._num_begun = self._num_begun, self._num_begun + 1
        order = seeded_epoch(number, self._steps, len(self.columns), seed=self._seed, shuffle=self.shuffle)
        requests = (order.request(k) for k in range(self.n_batches))
        batches = (self.columns.read(request.indices, number, request.position) for request in requests)
        return batches if self._has_y else (Pair(x, None) for x in batches)

    def reset(self) -> None:
        """Let `next_batch` begin the next epoch."""
        self._current, self._num_left = self.epoch(), self.n_batches

    def has_next(self) -> bool:
        return self._num_left > 0

    def next_batch(self) -> Pair:
        if not self._num_left:
            raise MisuseError(f"all {self.n_batches} batches of the epoch were taken: call reset() for the next epoch")
        self._num_left -= 1
        return next(self._current)
