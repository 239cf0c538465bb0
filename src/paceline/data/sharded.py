"""Every worker reads its own micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from paceline.data.sources import Source
from paceline.plan.order import EpochOrder
from paceline.plan.steps import Steps


class ShardedFeed:
    """Reads any micro-batch of an epoch, by number. Keeps the order of one epoch at a time."""

    def __init__(
        self,
        source: Source,
        steps: Steps,
        device: torch.device,
        *,
        seed: int,
        shuffle: bool,
        weight_fn: Callable[[Any], int] | None = None,
    ) -> None:
        self._source = source
        self._steps = steps
        self._device = device
        # Where there is no other device, nothing needs moving.
        self._is_on_host = device.type == "cpu" and not torch.cuda.is_available()
        self._seed = seed
        self._shuffle = shuffle
        self._weight_fn = weight_fn
        self._order = EpochOrder(steps.num_samples, seed=seed, epoch=0, shuffle=shuffle)
        self._epoch = 0

    def total_weight(self, first: int, count: int) -> int | None:
        """What the weights of these micro-batches of an epoch add up to, if that is known before they are read."""
        return len(self._steps.sample_range(first, count)) if self._weight_fn is None else None

    def micro_batch(self, epoch: int, number: int, count: int = 1) -> tuple[Any, int]:
        """The epoch's micro-batch with this number, on the device, and its weight in its step's mean.

        With `count` above 1 it is one batch of that many micro-batches.
        """
        if epoch != self._epoch:
            self._order = EpochOrder(self._steps.num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
            self._epoch = epoch
        positions = self._steps.sample_range(number, count)
        indices = self._order.indices(positions.start, positions.stop)
        batch = self._source.read(indices, epoch, positions.start)
        # Weighed on the host: asking a GPU would wait for it.
        weight = len(positions) if self._weight_fn is None else checked_weight(self._weight_fn(batch))
        return (batch if self._is_on_host else to_device(batch, self._device)), weight


def checked_weight(value: Any) -> int:
    """weight_fn's answer as a whole number."""
    try:
        weight = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # None, nan, inf, a tensor with several numbers
        weight = -1
    if weight < 0 or weight != value:
        raise ValueError(f"weight_fn returned {value!r}: it must be a whole number of at least 0, such as valid tokens")
    return weight


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor in nested tuples, lists and dicts, moved; anything else as it is."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, PackedSequence):  # a tuple, but one of its tensors stays on the host
        return batch.to(device=device, non_blocking=True)  # type: ignore[call-arg]
    if isinstance(batch, MutableMapping):
        moved = copy(batch)  # keeps what the type holds beside its items, such as a defaultdict's factory
        moved.update({key: to_device(value, device) for key, value in batch.items()})
        return moved
    if isinstance(batch, Mapping):
        return type(batch)({key: to_device(value, device) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(to_device(value, device) for value in batch)
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
