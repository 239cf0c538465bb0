"""Every worker reads its own micro-batches, from a source with numbered samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from paceline.data.epochs import CutEpoch, Epoch, Epochs, Request, num_left
from paceline.data.errors import ended_by_stop_iteration
from paceline.data.feeds.base import PlanStep, Step
from paceline.data.feeds.blocks import Blocks, blocks_of
from paceline.data.feeds.device import DeviceCopier
from paceline.data.feeds.prefetch import Prefetcher
from paceline.data.feeds.readers import ReaderProcesses, Readers, ReaderThread
from paceline.data.sources.base import CountedSource, Read, Source
from paceline.plan.shares import Plan
from paceline.plan.steps import Position


class ShardedFeed:
    """Plans each step and reads this worker's part of it.

    With readers, what the next steps will most likely ask of this worker is read ahead: the plan hardly changes from
    one step to the next, and where it does, what is missing is read at once.
    """

    def __init__(
        self,
        source: Source,
        epochs: Epochs,
        plan_step: PlanStep,
        rank: int,
        device: torch.device,
        *,
        weight_fn: Callable[[Any], int] | None = None,
        at_once: int = 1,
        readers: int = 0,
        prefetch: int | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        self._source = source
        self._epochs = epochs
        self._plan_step = plan_step
        self._rank = rank
        self._weight_fn = weight_fn
        self._at_once = at_once
        self._read = reader_of(source, is_weighed=weight_fn is not None)
        self._to_device = DeviceCopier(device)
        self._prefetcher = _prefetcher(source, self._read, readers, prefetch, timeout_s)
        # Weights that are known before reading save a pass over all gradients; samples that are left out are not.
        self._knows_weights = weight_fn is None and not counts_samples(source)
        self._epoch: Epoch | None = None
        self._plan: Plan = ()
        self._blocks: Blocks | None = None
        self._usual_step: Step | None = None  # where all steps of this plan are alike, but for the epoch's last

    def begin_step(self, position: Position) -> Step:
        epoch = self._epochs.begin(position.epoch)
        if epoch is not self._epoch:
            self._begin_epoch(epoch)
        left = num_left(epoch, position)
        plan = self._plan_step(left)
        self._position = position
        if plan is self._plan and self._usual_step is not None and plan[-1].stop < left:
            return self._usual_step
        self._plan = plan
        step = self._step(epoch, position, left)
        self._usual_step = step if isinstance(epoch, CutEpoch) and plan[-1].stop < left else None
        return step

    def micro_batch(self, numbers: range) -> tuple[Any, int]:
        epoch, batch = self._epoch, None
        assert epoch is not None
        if self._blocks is not None:
            batch = self._blocks.take(self._position.micro_batch + numbers[0], self._upcoming_numbers)
            num_samples = epoch.steps.micro_batch
            if batch is not None and self._weight_fn is None:
                return batch, num_samples  # on the device already
        if batch is None:
            batch, num_samples = self._one(epoch, numbers)
        if batch is None:
            return None, 0
        # Weighed on the host: asking a GPU would wait for it.
        weight = num_samples if self._weight_fn is None else weight_of(batch, self._weight_fn)
        return self._to_device(batch), weight

    def after_step(self, position: Position) -> Position:
        assert self._epoch is not None
        return position.after_step(self._plan[-1].stop, self._epoch.steps)

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _begin_epoch(self, epoch: Epoch) -> None:
        self._epoch = epoch
        may_read_blocks = self._prefetcher is None and self._at_once == 1
        move = self._to_device if self._weight_fn is None else None
        self._blocks = blocks_of(self._source, epoch, move) if may_read_blocks else None

    def _step(self, epoch: Epoch, position: Position, left: int) -> Step:
        count = self._plan[-1].stop
        num_samples = epoch.num_samples(position.micro_batch, count)
        is_cut = count == left and position.micro_batch > 0
        return Step(self._plan, num_samples, num_samples if self._knows_weights else None, is_cut)

    def _upcoming_numbers(self, number: int) -> Iterator[range]:
        """This worker's micro-batches of the epoch from that one on, if the plan stays as it is."""
        assert self._epoch is not None
        epoch = self._epoch
        last, begun, own = epoch.steps.num_micro_batches, self._position.micro_batch, self._plan[self._rank]
        if len(self._plan) == 1:
            yield range(number, last)
            return
        yield range(number, begun + own.stop)
        size = self._plan[-1].stop
        for next_begun in range(begun + size, last, size):
            yield range(next_begun + own.start, next_begun + own.stop)

    def _one(self, epoch: Epoch, numbers: range) -> tuple[Any, int]:
        request = epoch.request(self._position.micro_batch + numbers[0], len(numbers))
        if self._prefetcher is None:
            read = self._read(request)
        else:
            self._prefetcher.expect(self._upcoming(numbers[0]))
            read = self._prefetcher.take(request)
        if read.skipped:
            self._source.tell(read.skipped)  # type: ignore[attr-defined]
        return read.batch, read.num_samples

    def _upcoming(self, first: int) -> Iterator[Request]:
        """This worker's requests from the one at number `first` of this step on, as the plan would have them."""
        position, plan = self._position, self._plan
        epoch = self._epoch
        while epoch is not None:
            for numbers in passes(plan[self._rank], self._at_once):
                if numbers[0] >= first:
                    yield epoch.request(position.micro_batch + numbers[0], len(numbers))
            first = 0
            position = position.after_step(plan[-1].stop, epoch.steps)
            epoch = self._epochs.known(position.epoch)
            if epoch is not None:
                plan = self._plan_step(num_left(epoch, position))


def counts_samples(source: object) -> bool:
    """Whether how many samples a micro-batch of this source holds is known only when it was read."""
    return isinstance(source, CountedSource) and source.counts_samples


def reader_of(source: Source, *, is_weighed: bool = False) -> Callable[[Request], Read]:
    """Reads requests from this source; one that may leave samples out says how many it read.

    `is_weighed`: the user's weight_fn says what a micro-batch weighs, so nothing need be counted.
    """
    counted = source if isinstance(source, CountedSource) and source.counts_samples else None

    def read(asked: Request) -> Read:
        try:
            if counted is not None:
                return counted.read_counted(asked.indices, asked.epoch, asked.position, is_weighed=is_weighed)
            return Read(source.read(asked.indices, asked.epoch, asked.position), asked.num_samples)
        except StopIteration as error:
            raise ended_by_stop_iteration(f"reading samples {asked.indices.tolist()}") from error

    return read


def passes(numbers: range, at_once: int) -> Iterable[range]:
    """The micro-batches of a share, as many together as the device runs at once."""
    if 0 < len(numbers) <= at_once:
        return (numbers,)
    return [numbers[start : start + at_once] for start in range(0, len(numbers), at_once)]


def weight_of(batch: Any, weight_fn: Callable[[Any], int]) -> int:
    """weight_fn's answer as a whole number."""
    try:
        value = weight_fn(batch)
    except StopIteration as error:
        raise ended_by_stop_iteration("weight_fn") from error
    try:
        weight = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # None, nan, inf, a tensor with several numbers
        weight = -1
    if weight < 0 or weight != value:
        raise ValueError(f"weight_fn returned {value!r}: it must be a whole number of at least 0, such as valid tokens")
    return weight


def _prefetcher(
    source: Source, read: Callable[[Request], Read], num_readers: int, depth: int | None, timeout_s: float
) -> Prefetcher | None:
    readers: Readers
    if num_readers:
        readers = ReaderProcesses(read, num_readers, timeout_s)
    elif getattr(source, "may_read_in_thread", False):
        readers = ReaderThread(read, timeout_s)
    elif depth:
        raise ValueError(
            f"prefetch={depth} needs readers: this data runs code that a thread beside the step must not run; "
            "give readers=1 or more for processes of its own"
        )
    else:
        return None
    return Prefetcher(readers, depth or 2 * max(1, num_readers))
