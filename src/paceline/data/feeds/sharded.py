"""The feed for data with numbered samples, of which each worker reads its own micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.data.epochs import EpochSamples, NumberedEpochs, Request
from paceline.data.errors import ended_by_stop_iteration
from paceline.data.feeds.base import DataSettings, PlanStep, Step
from paceline.data.feeds.device import DeviceCopier
from paceline.data.feeds.readers import ReaderProcesses, Readers, ReaderThread
from paceline.data.sources.base import CountedSource, Read, ReportsSkipped, Source, counts_samples, reads_in_thread
from paceline.plan.shares import Plan
from paceline.plan.steps import Position


class ShardedFeed:
    """Plans each step and reads this worker's micro-batches of it.

    With readers, the micro-batches that the next steps will most likely assign to this worker are read ahead: the plan
    hardly changes between steps. Micro-batches that were not expected are read on demand.
    """

    def __init__(
        self,
        source: Source,
        epochs: NumberedEpochs,
        settings: DataSettings,
        plan_step: PlanStep,
        communicator: Communicator,
    ) -> None:
        self._epochs = epochs
        self._plan_step = plan_step
        self._rank = communicator.world.rank
        self._at_once = settings.at_once
        self._read = reader_of(source, is_weighed=settings.weight_fn is not None)
        self._deliver = Delivery(source, communicator.world.device, settings.weight_fn)
        self._prefetcher = _prefetcher(source, self._read, settings, communicator.timeout_s)
        self._epoch: EpochSamples
        self._plan: Plan = ()
        self._position = Position()

    def begin_step(self, position: Position) -> Step:
        self._epoch = epoch = self._epochs.begin(position.epoch)
        self._position = position
        left = epoch.num_left(position)
        self._plan = plan = self._plan_step(left)
        count = plan[-1].stop
        num_samples = epoch.num_samples(position.micro_batch, count)
        total_weight = num_samples if self._deliver.knows_weights else None
        return Step(plan, num_samples, total_weight, count == left and position.micro_batch > 0)

    def micro_batch(self, numbers: range) -> tuple[Any, int]:
        request = self._epoch.request(self._position.micro_batch + numbers[0], len(numbers))
        if self._prefetcher is None:
            return self._deliver(self._read(request))
        self._prefetcher.expect(self._upcoming(numbers[0]))
        return self._deliver(self._prefetcher.take(request))

    def after_step(self, position: Position) -> Position:
        return position.after_step(self._plan[-1].stop, self._epoch.steps)

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _upcoming(self, first: int) -> Iterator[Request]:
        """This worker's requests from number `first` of this step on, assuming that the plan stays the same."""
        position, plan = self._position, self._plan
        epoch: EpochSamples | None = self._epoch
        while epoch is not None:
            for numbers in passes(plan[self._rank], self._at_once):
                if numbers[0] >= first:
                    yield epoch.request(position.micro_batch + numbers[0], len(numbers))
            first = 0
            position = position.after_step(plan[-1].stop, epoch.steps)
            epoch = self._epochs.known(position.epoch)
            if epoch is not None:
                plan = self._plan_step(epoch.num_left(position))


class Delivery:
    """Turns what was read into a batch on the device and its weight, and reports skipped samples."""

    def __init__(self, source: object, device: torch.device, weight_fn: Callable[[Any], int] | None) -> None:
        self._to_device = DeviceCopier(device)
        self._weight_fn = weight_fn
        self._report_skipped = source.report_skipped if isinstance(source, ReportsSkipped) else None
        # Weights that are known before reading save a pass over all gradients. In exact mode this affects the last
        # bit, so it must depend on the data alone, not on how it is read.
        self.knows_weights = weight_fn is None and not counts_samples(source)

    def __call__(self, read: Read) -> tuple[Any, int]:
        if read.skipped and self._report_skipped is not None:
            self._report_skipped(read.skipped)
        if read.batch is None:
            return None, 0
        # Weighed on the host: reading a value from a GPU would wait for it.
        weight = read.num_samples if self._weight_fn is None else weight_of(read.batch, self._weight_fn)
        return self._to_device(read.batch), weight


class Prefetcher:
    """Keeps at most `depth` requests in flight. A request that was not expected is read on demand."""

    def __init__(self, readers: Readers, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"prefetch={depth} is too small: read at least 1 micro-batch ahead")
        self._readers = readers
        self._depth = depth
        self._in_flight: dict[Hashable, Callable[[], Any]] = {}

    def expect(self, upcoming: Iterable[Hashable]) -> None:
        """The next requests, in order. Earlier requests that are not among them are dropped."""
        wanted = list(islice(upcoming, self._depth))
        for request in self._in_flight.keys() - set(wanted):
            del self._in_flight[request]
        for request in wanted:
            if request not in self._in_flight:
                self._in_flight[request] = self._readers.submit(request)

    def take(self, request: Hashable) -> Any:
        answer = self._in_flight.pop(request, None) or self._readers.submit(request)
        return answer()

    def close(self) -> None:
        self._in_flight.clear()
        self._readers.close()


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


def passes(numbers: range, at_once: int) -> Iterable[range]:
    """A share's micro-batches, grouped into forward passes of at most `at_once`."""
    if 0 < len(numbers) <= at_once:
        return (numbers,)
    return [numbers[start : start + at_once] for start in range(0, len(numbers), at_once)]


def weight_of(batch: Any, weight_fn: Callable[[Any], int]) -> int:
    """The result of weight_fn as an integer."""
    try:
        value = weight_fn(batch)
    except StopIteration as error:
        raise ended_by_stop_iteration("weight_fn") from error
    try:
        weight = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # None, nan, inf, a tensor with several numbers
        weight = -1
    if weight < 0 or weight != value:
        raise ValueError(
            f"weight_fn returned {value!r}: it must be an integer >= 0, such as the number of valid tokens"
        )
    return weight


def _prefetcher(
    source: Source, read: Callable[[Request], Read], settings: DataSettings, timeout_s: float
) -> Prefetcher | None:
    count, depth = settings.readers, settings.prefetch
    if not count and not reads_in_thread(source):
        if depth:
            raise ValueError(
                f"prefetch={depth} needs reader processes: this data runs user code, which must not run in a thread "
                "beside the step; set readers >= 1"
            )
        return None
    readers = ReaderProcesses(read, count, timeout_s) if count else ReaderThread(read, timeout_s)
    return Prefetcher(readers, depth or 2 * max(1, count))
