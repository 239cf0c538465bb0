"""The feed for data with numbered samples, of which each worker reads its own micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.data.errors import UserCode, ended_by_stop_iteration
from paceline.data.feeds.base import DataSettings, PlanStep, Step
from paceline.data.feeds.device import DeviceCopier
from paceline.data.feeds.readers import Prefetcher, ReaderProcesses, ReaderThread
from paceline.data.sources.base import CountedSource, Read, ReportsSkipped, Source, counts_samples, reads_in_thread
from paceline.plan.epoch import Indices, Position, Steps
from paceline.plan.shares import Plan


@dataclass(slots=True, unsafe_hash=True)
class Request:
    """Samples to read as one batch. `position` is the place of the first one in the epoch's order."""

    epoch: int
    position: int
    num_samples: int
    indices: Indices = field(compare=False)  # follow from the other fields


@dataclass(eq=False)
class Epoch:
    """The samples of one epoch in order, cut into micro-batches.

    Args:
        indices: returns the sample indices at positions start to stop of the order.
        steps: counts the units that are cut: samples, or the batches of a batch sampler.
        starts: for the batches of a batch sampler, the position of each one's first sample, and the end.
    """

    number: int
    indices: Callable[[int, int], Indices]
    steps: Steps
    starts: Sequence[int] | None = None

    def positions(self, first: int, count: int) -> tuple[int, int]:
        """Where `count` micro-batches from number `first` on start and stop in the epoch's order."""
        if self.starts is not None:
            return self.starts[first], self.starts[first + count]
        positions = self.steps.sample_range(first, count)
        return positions.start, positions.stop

    def request(self, first: int, count: int = 1) -> Any:
        start, stop = self.positions(first, count)
        return Request(self.number, start, stop - start, self.indices(start, stop))

    def num_left(self, position: Position) -> int:
        """Micro-batches from this position to the end of the epoch, at least one."""
        total = self.steps.num_micro_batches
        if position.micro_batch >= total:
            raise ValueError(
                f"the run is at micro-batch {position.micro_batch} of epoch {position.epoch}, which has only {total}: "
                "the data is shorter than before; resume with the data that the run was started with"
            )
        return total - position.micro_batch

    def after(self, position: Position, num_micro_batches: int) -> Position:
        """The position after a step of so many micro-batches."""
        return position.after_step(num_micro_batches, self.steps)


class Epochs:
    """The epochs of a run. Two are kept: the one in training, and the one that is read ahead.

    `is_collective`: `make_epoch` communicates, so only `begin`, which all workers call together, may call it.
    """

    def __init__(self, make_epoch: Callable[[int], Epoch], *, is_collective: bool = False) -> None:
        self._make_epoch = make_epoch
        self._is_collective = is_collective
        self._kept: deque[Epoch] = deque(maxlen=2)

    def begin(self, number: int) -> Epoch:
        """The epoch that the run is in. All workers call this together."""
        for epoch in self._kept:
            if epoch.number == number:
                return epoch
        self._kept.append(self._make_epoch(number))
        return self._kept[-1]

    def reconnect(self) -> None:
        """There are other workers now: a collective order is drawn again, the same, by all of them."""
        if self._is_collective:
            self._kept.clear()

    def known(self, number: int) -> Epoch | None:
        """The epoch, or None if its order is not known before it begins."""
        if self._is_collective and all(epoch.number != number for epoch in self._kept):
            return None
        return self.begin(number)


class ShardedFeed:
    """Plans each step and reads this worker's micro-batches of it.

    With readers, the micro-batches that the next steps will most likely assign to this worker are read ahead: the plan
    hardly changes between steps. Micro-batches that were not expected are read on demand.
    """

    def __init__(
        self, source: Source, epochs: Epochs, settings: DataSettings, plan_step: PlanStep, communicator: Communicator
    ) -> None:
        self._epochs = epochs
        self._plan_step = plan_step
        self._communicator = communicator
        self._rank = communicator.world.rank
        self._at_once = settings.at_once
        self._read = reader_of(source, is_weighed=settings.weight_fn is not None)
        self._deliver = Delivery(source, communicator.world.device, settings.weight_fn)
        self._prefetcher = prefetcher_of(
            source, self._read, settings.readers, communicator.timeout_s, depth=settings.prefetch
        )
        self._epoch: Epoch | None = None
        self._plan: Plan = ()
        self._position = Position()

    def begin_step(self, position: Position) -> Step:
        epoch = self._epoch
        if epoch is None or epoch.number != position.epoch:
            self._epoch = epoch = self._epochs.begin(position.epoch)
        self._position = position
        left = epoch.num_left(position)
        self._plan = plan = self._plan_step(left)
        count = plan[-1].stop
        start, stop = epoch.positions(position.micro_batch, count)
        num_samples = stop - start
        total_weight = num_samples if self._deliver.knows_weights else None
        is_cut = count == left and position.micro_batch > 0
        return Step(plan, num_samples, total_weight, is_cut, epoch.after(position, count))

    def micro_batch(self, numbers: range) -> tuple[Any, int]:
        assert self._epoch is not None, "begin_step comes first"
        request = self._epoch.request(self._position.micro_batch + numbers[0], len(numbers))
        if self._prefetcher is None:
            return self._deliver(self._read(request))
        self._prefetcher.expect(self._upcoming(numbers[0]))
        return self._deliver(self._prefetcher.take(request))

    def reconnect(self) -> None:
        self._rank = self._communicator.world.rank
        self._epochs.reconnect()
        self._epoch = None

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _upcoming(self, first: int) -> Iterator[Request]:
        """This worker's requests from number `first` of this step on, assuming that the plan stays the same."""
        position, plan, epoch = self._position, self._plan, self._epoch
        while epoch is not None:
            for numbers in passes(plan[self._rank], self._at_once):
                if numbers[0] >= first:
                    yield epoch.request(position.micro_batch + numbers[0], len(numbers))
            first = 0
            position = epoch.after(position, plan[-1].stop)
            epoch = self._epochs.known(position.epoch)
            if epoch is not None:
                plan = self._plan_step(epoch.num_left(position))


class Delivery:
    """Turns what was read into a batch on the device and its weight, and reports skipped samples."""

    def __init__(self, source: object, device: torch.device, weight_fn: Callable[[Any], int] | None) -> None:
        copier = DeviceCopier(device)
        self._to_device = None if copier.is_noop else copier
        self._weight_fn = weight_fn
        self._report_skipped = source.report_skipped if isinstance(source, ReportsSkipped) else None
        # Weights that are known before reading save a pass over all gradients. In exact mode this affects the last
        # bit, so it must depend on the data alone, not on how it is read.
        self.knows_weights = weight_fn is None and not counts_samples(source)

    def __call__(self, read: Read) -> tuple[Any, int]:
        batch, num_samples, skipped, _ = read
        if skipped and self._report_skipped is not None:
            self._report_skipped(skipped)
        if batch is None:
            return None, 0
        # Weighed on the host: reading a value from a GPU would wait for it.
        weight = num_samples if self._weight_fn is None else weight_of(batch, self._weight_fn)
        return batch if self._to_device is None else self._to_device(batch), weight


def reader_of(source: Source, *, is_weighed: bool = False) -> Callable[[Request], Read]:
    """A function that reads requests from this source. `is_weighed`: samples need not be counted, because a weight_fn
    decides the weight."""
    counted = source if isinstance(source, CountedSource) and source.counts_samples else None

    def read(request: Request) -> Read:
        try:
            if counted is not None:
                return counted.read_counted(request.indices, request.epoch, request.position, is_weighed=is_weighed)
            return Read(source.read(request.indices, request.epoch, request.position), request.num_samples)
        except StopIteration as error:
            raise ended_by_stop_iteration(f"reading samples {request.indices.tolist()}") from error

    return read


def passes(numbers: range, at_once: int) -> Iterator[range]:
    """A share's micro-batches, grouped into forward passes of at most `at_once`."""
    for start in range(0, len(numbers), at_once):
        yield numbers[start : start + at_once]


def weight_of(batch: Any, weight_fn: Callable[[Any], int]) -> int:
    """The result of weight_fn as an integer."""
    with UserCode("calling weight_fn"):
        value = weight_fn(batch)
    try:
        weight = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # None, nan, inf, a tensor with several numbers
        weight = -1
    if weight < 0 or weight != value:
        raise ValueError(
            f"weight_fn returned {value!r}: it must be an integer >= 0, such as the number of valid tokens"
        )
    return weight


def prefetcher_of(
    source: Source, read: Callable[[Request], Read], num_readers: int, timeout_s: float, depth: int | None = None
) -> Prefetcher | None:
    """Reads ahead in processes, or in a thread if the source allows that; None if the source is read on demand."""
    if num_readers or reads_in_thread(source):
        readers = ReaderProcesses(read, num_readers, timeout_s) if num_readers else ReaderThread(read, timeout_s)
        return Prefetcher(readers, depth or 2 * max(1, num_readers))
    if depth:
        raise ValueError(
            f"prefetch={depth} needs reader processes: this data runs user code, which must not run in a thread "
            "beside the step; set readers >= 1"
        )
    return None
