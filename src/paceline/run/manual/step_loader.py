"""One batch per device of this process in every step, read ahead while the devices compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.comm.single import SingleCommunicator
from paceline.core.settings import check_value
from paceline.core.world import World, choose_devices
from paceline.core.world import devices as all_devices
from paceline.data.adopt import LoadingOptions, adopt
from paceline.data.epochs import source_of
from paceline.data.feeds.device import DeviceCopier
from paceline.data.feeds.make_feed import DataSettings, make_feed
from paceline.data.sources.base import Columns
from paceline.data.sources.batches import Batches, PerWorker
from paceline.data.sources.streams import IterableStream
from paceline.plan.epoch import Position, Steps
from paceline.plan.shares import Plan


class DeviceFeed:
    """One batch per device and step, on the device. The same feed serves the devices of all processes.

    options: its micro_batch is the number of samples per device and step, None if the data has its own batch size;
    `size_name` is the user's name for it. devices: of this process. counts: devices of each process, by rank.
    buffersize: steps to read ahead; None: two batches per reader.
    """

    def __init__(
        self,
        data: Any,
        options: LoadingOptions,
        seed: int,
        devices: Sequence[torch.device],
        counts: Sequence[int],
        communicator: Communicator,
        *,
        drop_last: bool = False,
        buffersize: int | None = None,
        size_name: str,
    ) -> None:
        bounds = list(accumulate(counts, initial=0))
        total = bounds[-1]
        if isinstance(data, PerWorker) and len(data.iterables) != total:
            raise ValueError(f"PerWorker has {len(data.iterables)} iterables for {total} devices: give one per device")
        batches_per_step = total if isinstance(data, Batches | PerWorker) else None
        options = replace(options, batches_per_step=batches_per_step, strategy_sets_step=True)
        adopted = adopt(data, options, seed)
        if adopted.micro_batch is None:
            raise ValueError(f"{size_name} is missing: give the number of samples per device and step")
        self.is_stream = isinstance(adopted.data, IterableStream)
        in_memory = not isinstance(adopted.data, IterableStream) and isinstance(source_of(adopted.data), Columns)
        if self.is_stream and drop_last:
            raise ValueError(
                "drop_last=True needs data with numbered samples: a stream's last step is not known in advance"
            )
        if buffersize is not None and (in_memory or self.is_stream):
            why = "a stream is always read ahead by steps" if self.is_stream else "tensors and arrays are in memory"
            raise ValueError(f"buffersize={buffersize} would be ignored, since {why}: leave it out")
        per_step = adopted.micro_batch * total
        num_samples = per_step if isinstance(adopted.data, IterableStream) else len(adopted.data)
        self.nsamples = adopted.micro_batch
        self.steps = Steps(num_samples, per_step, self.nsamples, drop_last)
        self._rank = communicator.world.rank
        self._copiers = [DeviceCopier(device) for device in devices]
        settings = DataSettings(
            seed,
            adopted.shuffle,
            adopted.feed,
            readers=adopted.readers if in_memory or options.readers is not None else max(1, adopted.readers),
            prefetch=None if buffersize is None else len(devices) * buffersize,
            weight_fn=lambda _: 1,  # the weights of these batches are not used
            collate_fn=adopted.collate_fn,
        )

        def plan(num_left: int) -> Plan:
            return tuple(range(min(start, num_left), min(stop, num_left)) for start, stop in pairwise(bounds))

        # A single process reads on the host for all its devices.
        if communicator.world.size == 1:
            communicator = SingleCommunicator(World(device=torch.device("cpu")))
        self._feed = make_feed(adopted.data, settings, self.steps, plan, communicator)

    def read(self, position: Position) -> tuple[tuple[Any, ...], Position] | None:
        """The batches of the step at `position`, None for a device without one, and the position after the step.

        Returns None if the epoch has no further step.
        """
        step = self._feed.begin_step(position)
        if step is None:
            return None
        batches = [self._feed.micro_batch(range(k, k + 1))[0] for k in step.plan[self._rank]]
        missing = [None] * (len(self._copiers) - len(batches))
        return tuple(copy(batch) for copy, batch in zip(self._copiers, [*batches, *missing], strict=True)), step.after

    def close(self) -> None:
        """End the readers. Safe to call twice."""
        self._feed.close()


class StepLoader(DeviceFeed):
    """Iterate over it for the steps of the run: each is a tuple with the batch of every replica of this process.

    A batch is on its replica's device, and None for a replica without one. Every sample comes once per epoch; the last
    step of an epoch may be smaller. A new loop continues after the last step of an interrupted one.
    """

    def __init__(self, *args: Any, epochs: int, cycle: int | None, **reading: Any) -> None:
        """epochs: passes over the data; cycle: steps instead, for which the data is repeated as often as needed."""
        super().__init__(*args, **reading)
        self._epochs = epochs
        self._cycle = cycle
        self._next = Position()
        self.epoch = 0

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run; None for epochs of a stream, whose number of steps is not known in advance."""
        if self._cycle is not None:
            return self._cycle
        return None if self.is_stream else self._epochs * self.steps.num_steps

    def __len__(self) -> int:
        if self.num_steps is None:
            raise TypeError("the number of steps of a stream is not known in advance: give cycle, or count them")
        return self.num_steps

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        while self._next.epoch < self._epochs if self._cycle is None else self._next.step < self._cycle:
            if (read := self.read(self._next)) is None:
                self._next = self._next.next_epoch()
                continue
            self.epoch = self._next.epoch
            batches, self._next = read
            yield batches


class DataParallelDataLoader(DeviceFeed):
    """A batch for each device in every step, read ahead while the devices compute.

        with DataParallelDataLoader(data, devices, batch_size=32) as loader:
            for batches in loader:  # a tuple: the batch of device i, on it; None if there is none left

    Every iteration over it is the next epoch, in a new order if shuffled. Each sample comes once per epoch; in the last
    step batches may be smaller, and the last devices may get none.

    Args:
        data: as for `Trainer.setup`, a torch DataLoader included; `Batches`; or `PerWorker` with one iterable per
            device.
        devices: default, all of this machine.
        batch_size: samples per device; leave it out if the data has its own batch size.
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
        check_value("batch_size", batch_size, int | None, least=1)
        chosen = all_devices() if devices is None else choose_devices(devices)
        if not chosen:
            raise ValueError("devices is empty: name at least one, or leave it out for all")
        super().__init__(
            data,
            LoadingOptions(micro_batch=batch_size, shuffle=shuffle, readers=readers, collate_fn=collate_fn),
            seed,
            chosen,
            [len(chosen)],
            SingleCommunicator(World(device=torch.device("cpu"))),
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
