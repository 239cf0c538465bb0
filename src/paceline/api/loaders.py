"""`DataParallelDataLoader`: one iterator that feeds several devices of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.comm.single import SingleCommunicator
from paceline.core.world import World
from paceline.core.world import devices as all_devices
from paceline.plan.steps import Position
from paceline.run.manual.step_loader import DeviceFeed


class DataParallelDataLoader(DeviceFeed):
    """A batch for each device in every step, read ahead while the devices compute.

        with DataParallelDataLoader(data, devices, batch_size=32) as loader:
            for batches in loader:  # a tuple: the batch of device i, on it; None where there is none left

    Every iteration over it is the next epoch, in a new order if shuffled. Each sample comes once per epoch; in the last
    step batches may be smaller, and the last devices may get none.

    Args:
        data: as for `Trainer.setup`, a torch DataLoader included; `Batches`; or `PerWorker` with one iterable per
            device.
        devices: default, all of this machine.
        batch_size: samples per device; left out where the data has its own batch size.
        drop_last: leave out a last step that has less than a full batch for each device.
        readers: processes that read ahead (default: one; none for arrays and tensors, which are in memory).
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
        chosen = all_devices() if devices is None else [torch.device(device) for device in devices]
        if not chosen:
            raise ValueError("devices is empty: name at least one, or leave it out for all")
        super().__init__(
            data,
            chosen,
            [len(chosen)],
            SingleCommunicator(World(device=torch.device("cpu"))),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            readers=readers,
            collate_fn=collate_fn,
            drop_last=drop_last,
            size_name="batch_size",
        )
        self._epoch = 0

    def __len__(self) -> int:
        """Steps of an epoch."""
        if self.is_stream:
            raise TypeError("the number of steps of a stream is not known in advance: count them as they come")
        return self.steps.num_steps

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        position = Position(self._epoch)
        self._epoch += 1
        while position.epoch < self._epoch and (read := self.read(position)) is not None:
            batches, position = read
            yield batches

    def __enter__(self) -> DataParallelDataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
