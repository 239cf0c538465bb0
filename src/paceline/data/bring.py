"""Choosing how micro-batches come to the workers, from what the data is and what the user wants."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch.utils.data import IterableDataset

from paceline.comm.base import Communicator
from paceline.comm.single import SingleCommunicator
from paceline.data.feed import Feed, PlanStep
from paceline.data.readers import ReaderProcesses, Readers, ReaderThread
from paceline.data.sharded import IndexedReader, Request, ShardedFeed
from paceline.data.sources import Read, Source, as_source
from paceline.data.streams import IterableStream, Slot, StreamReader
from paceline.data.together import Inline, OwnParts, Planned, ReadByOne, TogetherFeed
from paceline.plan.steps import Position, Steps

Way: TypeAlias = Literal["sharded", "dispatched"]

# Steps that are planned and read ahead where workers read together.
AHEAD = 2
# Reading ahead may rest for as long as training does: in an evaluation, say. Who waits in vain is told by the step.
PATIENCE_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class DataSettings:
    """How the data is to be read; see `Trainer.setup`."""

    seed: int
    shuffle: bool
    way: Way = "sharded"
    readers: int = 0
    prefetch: int | None = None
    num_shards: int | None = None
    shuffle_buffer: int = 0
    weight_fn: Callable[[Any], int] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    at_once: int = 1


def as_data(data: Any, *, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> Source | IterableStream:
    """What the user passed as `data`: samples with numbers, or a stream of them."""
    has_numbers = hasattr(data, "__len__") and (hasattr(data, "__getitem__") or hasattr(data, "read"))
    # Every torch Dataset has __getitem__, one that is only iterable in name.
    is_iterable_only = isinstance(data, IterableDataset) or (not has_numbers and hasattr(data, "__iter__"))
    return IterableStream(data, seed) if is_iterable_only else as_source(data, collate_fn=collate_fn, seed=seed)


def make_feed(
    data: Source | IterableStream,
    settings: DataSettings,
    steps: Steps,
    plan_step: PlanStep,
    communicator: Communicator,
) -> Feed:
    """The feed for this data. What cannot be is refused before anything is started."""
    world = communicator.world
    is_stream = isinstance(data, IterableStream)
    if not is_stream and settings.way == "sharded":
        return ShardedFeed(
            data,
            steps,
            plan_step,
            world.rank,
            world.device,
            seed=settings.seed,
            shuffle=settings.shuffle,
            weight_fn=settings.weight_fn,
            at_once=settings.at_once,
            readers=settings.readers,
            prefetch=settings.prefetch,
        )
    if settings.at_once > 1:
        raise ValueError(
            "physical_batch needs data with numbered samples that each worker reads for itself: leave it out, or "
            "choose a larger micro_batch"
        )
    with ExitStack() as undo:
        reading = _Reading(data, settings, steps)
        undo.callback(reading.close)
        deliver = _deliver(reading.read_all, settings.way, communicator, undo)
        runs_beside = settings.readers > 0 or getattr(data, "may_read_in_thread", False)
        return TogetherFeed(
            _StreamCourse() if is_stream else _SizedCourse(steps),
            plan_step,
            _Closing(ReaderThread(deliver) if runs_beside else Inline(deliver), undo.pop_all()),
            world.rank,
            world.device,
            ahead=AHEAD if runs_beside else 0,
            weight_fn=settings.weight_fn,
            tell=getattr(data, "tell", None),
        )


def _deliver(
    read_all: Callable[[Planned, range], Sequence[Read]], way: Way, communicator: Communicator, undo: ExitStack
) -> Callable[[Planned], Any]:
    world = communicator.world
    if world.size == 1:
        return OwnParts(read_all, SingleCommunicator(world))
    # Imported here: a world of one should not pay for torch.distributed.
    from paceline.comm.process_group import ProcessGroupCommunicator

    # A group of its own, since it is used beside the step's exchange.
    link = ProcessGroupCommunicator(world, "gloo", PATIENCE_S)
    undo.callback(link.close)
    return ReadByOne(read_all, link) if way == "dispatched" else OwnParts(read_all, link)


class _Reading:
    """Reads micro-batches of a planned step: here, or in processes."""

    def __init__(self, data: Source | IterableStream, settings: DataSettings, steps: Steps) -> None:
        if isinstance(data, IterableStream):
            self._read: StreamReader | IndexedReader = StreamReader(
                data,
                steps.micro_batch,
                _checked_shards(settings.num_shards, steps),
                seed=settings.seed,
                shuffle_buffer=settings.shuffle_buffer,
                collate_fn=settings.collate_fn,
            )
        else:
            self._read = IndexedReader(data, steps, seed=settings.seed, shuffle=settings.shuffle)
        self._num_readers = settings.readers
        self._processes = ReaderProcesses(self._read, settings.readers) if settings.readers else None

    def read_all(self, planned: Planned, numbers: range) -> Sequence[Read]:
        read, processes = self._read, self._processes
        if isinstance(read, IndexedReader):
            requests = [Request(planned.epoch, planned.first + k) for k in numbers]
            if processes is None:
                return [read(request) for request in requests]
            return [answer() for answer in [processes.submit(request) for request in requests]]
        slots = [Slot(planned.epoch, planned.first + k) for k in numbers]
        if processes is None:
            return [read(slot) for slot in slots]
        answers = [processes.submit(slot, read.reader_of(slot, self._num_readers)) for slot in slots]
        return [answer() for answer in answers]

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()


class _Closing:
    """Readers that take down what they were built on when they are closed."""

    def __init__(self, readers: Readers, cleanup: ExitStack) -> None:
        self._readers = readers
        self._cleanup = cleanup

    def submit(self, request: Any) -> Callable[[], Any]:
        return self._readers.submit(request)

    def close(self) -> None:
        self._readers.close()
        self._cleanup.close()


class _SizedCourse:
    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def num_left(self, position: Position) -> int:
        return self._steps.num_micro_batches - position.micro_batch

    def after(self, position: Position, num_micro_batches: int) -> Position:
        return position.after_step(num_micro_batches, self._steps)


class _StreamCourse:
    """Nobody knows where it ends: a step in which no micro-batch exists ends the epoch."""

    def num_left(self, position: Position) -> int:
        return sys.maxsize

    def after(self, position: Position, num_micro_batches: int) -> Position:
        return Position(position.epoch, position.micro_batch + num_micro_batches, position.step + 1)


def _checked_shards(num_shards: int | None, steps: Steps) -> int:
    """A step takes equally many micro-batches of every shard, so that one without any ends the epoch."""
    per_step = steps.max_micro_batches
    if num_shards is None:
        return per_step
    if num_shards < 1 or per_step % num_shards:
        divisors = [d for d in range(1, per_step + 1) if per_step % d == 0]
        raise ValueError(
            f"num_shards={num_shards} does not divide the {per_step} micro-batches of a step: choose one of "
            f"{', '.join(map(str, divisors))}"
        )
    return num_shards
