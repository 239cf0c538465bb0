"""The batches of every step, for all replicas of this process, read ahead while they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.comm.single import SingleCommunicator
from paceline.core.world import World
from paceline.data.adopt import Adopted, LoadingOptions, adopt
from paceline.data.epochs import source_of
from paceline.data.feeds.device import DeviceCopier
from paceline.data.feeds.make_feed import DataSettings, make_feed
from paceline.data.sources.base import Columns
from paceline.data.sources.batches import Batches, PerWorker
from paceline.data.sources.streams import IterableStream
from paceline.plan.shares import Plan
from paceline.plan.steps import Position, Steps


@dataclass(frozen=True)
class Reading:
    """How the data of a `StepLoader` is read. `nsamples`: per replica and step; None where the data says it.

    `epochs` passes over the data, or `cycle` steps, for which it is begun again as often as needed. `buffersize`: how
    many steps are read ahead (None: two batches per reader).
    """

    nsamples: int | None
    epochs: int
    cycle: int | None
    buffersize: int | None
    readers: int | None
    shuffle: bool | None
    collate_fn: Callable[[list[Any]], Any] | None
    seed: int

    def __post_init__(self) -> None:
        for name in ("nsamples", "epochs", "cycle", "buffersize"):
            value = getattr(self, name)
            is_left_out = value is None and name != "epochs"
            if not is_left_out and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}: choose a whole number >= 1")
        if self.cycle is not None and self.epochs != 1:
            raise ValueError(
                f"epochs={self.epochs} and cycle={self.cycle} both say when to stop: give epochs, passes over the "
                "data, or cycle, steps"
            )


class StepLoader:
    """Iterate over it for the steps of the run: each a tuple with the batch of every replica of this process, on its
    device, None where there is none left.

    Every sample comes once per epoch; the last step of an epoch may be smaller. A loop that was left goes on with the
    next step when it is begun again.
    """

    def __init__(
        self,
        data: Any,
        reading: Reading,
        devices: Sequence[torch.device],
        num_replicas: Sequence[int],
        communicator: Communicator,
    ) -> None:
        """`num_replicas`: of each process, by rank; `devices` are those of this one."""
        bounds = list(accumulate(num_replicas, initial=0))
        total = bounds[-1]
        adopted = _adopt(data, reading, total)
        self._is_stream = isinstance(adopted.data, IterableStream)
        self._steps = _steps(adopted, total)
        self._reading = reading
        self._rank = communicator.world.rank
        self._copiers = [DeviceCopier(device) for device in devices]
        self._next = Position()
        self.nsamples = self._steps.micro_batch
        self.epoch = 0

        def plan(num_left: int) -> Plan:
            return tuple(range(min(start, num_left), min(stop, num_left)) for start, stop in pairwise(bounds))

        # Alone, this process reads on the host for all its devices.
        is_alone = communicator.world.size == 1
        via = SingleCommunicator(World(device=torch.device("cpu"))) if is_alone else communicator
        settings = _settings(adopted, reading, len(devices))
        self._feed = make_feed(adopted.data, settings, self._steps, plan, via)

    @property
    def num_steps(self) -> int | None:
        """Of the whole run; None where nobody knows, for epochs of a stream."""
        if self._reading.cycle is not None:
            return self._reading.cycle
        return None if self._is_stream else self._reading.epochs * self._steps.num_steps

    def __len__(self) -> int:
        """Steps of the whole run."""
        if self.num_steps is None:
            raise TypeError("nobody knows how many steps a stream has: give cycle, or count them as they come")
        return self.num_steps

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        while not self._is_over():
            step = self._feed.begin_step(self._next)
            if step is None:
                self._next = self._next.next_epoch()
                continue
            self.epoch = self._next.epoch
            batches = [self._feed.micro_batch(range(k, k + 1))[0] for k in step.plan[self._rank]]
            missing = [None] * (len(self._copiers) - len(batches))
            self._next = self._feed.after_step(self._next)
            yield tuple(copy(batch) for copy, batch in zip(self._copiers, [*batches, *missing], strict=True))

    def close(self) -> None:
        """End the readers."""
        self._feed.close()

    def _is_over(self) -> bool:
        if self._reading.cycle is not None:
            return self._next.step >= self._reading.cycle
        return self._next.epoch >= self._reading.epochs


def _adopt(data: Any, reading: Reading, num_replicas: int) -> Adopted:
    comes_in_batches = isinstance(data, Batches | PerWorker)
    if isinstance(data, PerWorker) and len(data.iterables) != num_replicas:
        raise ValueError(
            f"PerWorker has {len(data.iterables)} iterables for {num_replicas} replicas: give one for each"
        )
    options = LoadingOptions(
        micro_batch=reading.nsamples,
        batches_per_step=num_replicas if comes_in_batches else None,
        strategy_sets_step=True,
        shuffle=reading.shuffle,
        readers=reading.readers,
        collate_fn=reading.collate_fn,
    )
    adopted = adopt(data, options, reading.seed)
    if adopted.micro_batch is None:
        raise ValueError("nsamples is missing: give the number of samples per replica and step")
    return adopted


def _steps(adopted: Adopted, num_replicas: int) -> Steps:
    assert adopted.micro_batch is not None
    per_step = adopted.micro_batch * num_replicas
    num_samples = per_step if isinstance(adopted.data, IterableStream) else len(adopted.data)
    return Steps(num_samples, per_step, adopted.micro_batch)


def _settings(adopted: Adopted, reading: Reading, num_devices: int) -> DataSettings:
    is_stream = isinstance(adopted.data, IterableStream)
    is_there = not isinstance(adopted.data, IterableStream) and isinstance(source_of(adopted.data), Columns)
    if reading.buffersize is not None and (is_there or is_stream):
        why = "a stream is read ahead by steps anyhow" if is_stream else "tensors and arrays are in memory already"
        raise ValueError(f"buffersize={reading.buffersize} would be ignored, since {why}: leave it out")
    return DataSettings(
        reading.seed,
        adopted.shuffle,
        adopted.feed,
        readers=adopted.readers if is_there or reading.readers is not None else max(1, adopted.readers),
        prefetch=None if reading.buffersize is None else num_devices * reading.buffersize,
        collate_fn=adopted.collate_fn,
    )
