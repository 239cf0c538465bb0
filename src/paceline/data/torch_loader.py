"""The settings of a torch DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from paceline.data.sources.base import Samples, Source, as_source


@dataclass(frozen=True)
class LoaderSettings:
    """The settings of a DataLoader that concern what is read.

    `collate_fn` is None for torch's default. `batch_size` is None if batches have different sizes: `batch_sampler`
    draws them, or, if it is None, the data set's items are batches. `shuffle` is None if a `sampler` decides.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any] | None
    batch_size: int | None
    drop_last: bool
    shuffle: bool | None
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Any] | None
    num_workers: int

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> LoaderSettings:
        """Raises an error for a DataLoader that Paceline cannot replace.

        Settings of torch's own worker processes (pin_memory, prefetch_factor, persistent_workers, timeout,
        multiprocessing_context) have no effect.
        """
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise TypeError(
                f"data is a {type(loader).__name__}, a DataLoader with a custom __iter__: pass "
                "paceline.Batches(loader) to use its batches as they are, or a plain torch DataLoader"
            )
        if loader.worker_init_fn is not None:
            raise ValueError(
                "the DataLoader has a worker_init_fn, which Paceline's readers do not call: random numbers are seeded "
                "for every sample without it; move other initialization into the data set, and leave it out"
            )
        batch_sampler: Any = loader.batch_sampler
        sampler, batch_size, drop_last = loader.sampler, None, False
        if type(batch_sampler) is BatchSampler:
            sampler, batch_size, drop_last = batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last
            batch_sampler = None
        for part in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
            if hasattr(part, "num_replicas") and hasattr(part, "rank"):
                raise ValueError(
                    f"the DataLoader's {type(part).__name__} gives each worker a part of the data, but Paceline "
                    "divides the data itself: make the DataLoader as for one process, with shuffle or another sampler"
                )
        # torch's default depends on whether items are samples or batches.
        has_default = loader.collate_fn in (default_collate, default_convert)
        shuffle = _is_shuffled(sampler, loader.dataset) if batch_sampler is None else None
        return cls(
            loader.dataset,
            None if has_default else loader.collate_fn,
            batch_size,
            drop_last,
            shuffle,
            sampler if shuffle is None and batch_sampler is None else None,
            batch_sampler,
            loader.num_workers,
        )

    def source(self, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> Source:
        """The data set's samples. For a DataLoader a tuple or dict is a collection of samples, not of columns."""
        is_array = isinstance(self.dataset, torch.Tensor | np.ndarray)
        if isinstance(self.dataset, tuple | Mapping) or (is_array and collate_fn is not None):
            return Samples(self.dataset, collate_fn, seed)
        return as_source(self.dataset, collate_fn=collate_fn, seed=seed)


def _is_shuffled(sampler: Any, dataset: Any) -> bool | None:
    """Whether a sequential or random sampler of torch covers the whole data set; None for any other sampler."""
    if type(sampler) is SequentialSampler and len(sampler) == len(dataset):
        return False
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(dataset):
        return True
    return None
