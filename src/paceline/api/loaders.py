"""`DataParallelDataLoader`: one iterator that feeds several devices of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.comm.single import SingleCommunicator
from paceline.core.world import World
from paceline.core.world import devices as all_devices
from paceline.data.adopt import Adopted, LoadingOptions, adopt
from paceline.data.epochs import source_of
from paceline.data.feeds.device import DeviceCopier
from paceline.data.feeds.make_feed import DataSettings, make_feed
from paceline.data.sources.base import Columns
from paceline.data.sources.batches import Batches, PerWorker
from paceline.data.sources.streams import IterableStream
from paceline.plan.steps import Position, Steps


class DataParallelDataLoader:
    """A batch for each device in every step, read ahead while the devices compute.

        with DataParallelDataLoader(data, devices, batch_size=32) as loader:
            for batches in loader:  # a tuple: the batch of device i, on it; None where there is none left

    Every iteration over it is the next epoch, in an order of its own if shuffled. Each sample comes once per epoch; in
    the last step batches may be smaller, and the last devices may get none.

    Args:
        data: whatever `Trainer.setup` takes, a torch DataLoader too; `Batches`; or `PerWorker` with one iterable per
            device.
        devices: default, all of this machine.
        batch_size: samples per device; left out where the data says it.
        drop_last: leave out a last step that has less than a full batch for each device.
        readers: processes that read ahead (default: one; none for arrays and tensors, which are there already).
        shuffle, collate_fn, seed: as in `Trainer.setup`.
    """

    def __init__(
        self,
        data: Any,
        devices: Sequence[torch.device | str] | None = None,
        batch_size: int | None = None,
        *,
        shuffle: bool | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        readers: int | None = None,
        seed: int = 0,
    ) -> None:
        places = all_devices() if devices is None else [torch.device(device) for device in devices]
        if not places:
            raise ValueError("devices is empty: name at least one, or leave it out for all")
        count = len(places)
        if isinstance(data, PerWorker) and len(data.iterables) != count:
            raise ValueError(f"PerWorker has {len(data.iterables)} iterables for {count} devices: give one per device")
        comes_in_batches = isinstance(data, Batches | PerWorker)
        options = LoadingOptions(
            micro_batch=batch_size,
            batches_per_step=count if comes_in_batches else None,
            strategy_sets_step=True,
            shuffle=shuffle,
            readers=readers,
            collate_fn=collate_fn,
        )
        adopted = adopt(data, options, seed)
        if adopted.micro_batch is None:
            raise ValueError("batch_size is missing: give the number of samples per device and step")
        self._is_stream = isinstance(adopted.data, IterableStream)
        self._steps = _steps(adopted, count, drop_last)
        self._epoch = 0
        self._copiers = [DeviceCopier(device) for device in places]
        settings = DataSettings(
            seed,
            adopted.shuffle,
            readers=_default_readers(adopted) if readers is None else adopted.readers,
            weight_fn=lambda _: 1,  # nobody weighs these batches
            collate_fn=adopted.collate_fn,
        )
        alone = SingleCommunicator(World(device=torch.device("cpu")))
        self._feed = make_feed(adopted.data, settings, self._steps, lambda left: (range(min(count, left)),), alone)

    def __len__(self) -> int:
        """Steps of an epoch."""
        if self._is_stream:
            raise TypeError("nobody knows how many steps a stream has: count them as they come")
        return self._steps.num_steps

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        position = Position(self._epoch)
        self._epoch += 1
        while position.epoch < self._epoch and (step := self._feed.begin_step(position)) is not None:
            batches = [self._feed.micro_batch(range(k, k + 1))[0] for k in step.plan[0]]
            missing = [None] * (len(self._copiers) - len(batches))
            yield tuple(copy(batch) for copy, batch in zip(self._copiers, [*batches, *missing], strict=True))
            position = self._feed.after_step(position)

    def close(self) -> None:
        """End the readers. Safe to call twice."""
        self._feed.close()

    def __enter__(self) -> DataParallelDataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _steps(adopted: Adopted, num_devices: int, drop_last: bool) -> Steps:
    assert adopted.micro_batch is not None
    per_step = adopted.micro_batch * num_devices
    if not isinstance(adopted.data, IterableStream):
        return Steps(len(adopted.data), per_step, adopted.micro_batch, drop_last)
    if drop_last:
        raise ValueError("drop_last=True needs data with numbered samples: nobody knows which step of a stream is last")
    return Steps(per_step, per_step, adopted.micro_batch)


def _default_readers(adopted: Adopted) -> int:
    is_there = not isinstance(adopted.data, IterableStream) and isinstance(source_of(adopted.data), Columns)
    return 0 if is_there else max(1, adopted.readers)
