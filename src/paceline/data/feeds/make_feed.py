"""Choosing how micro-batches come to the workers, from what the data is and what the user wants."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from torch.utils.data import IterableDataset

from paceline.comm.base import Communicator, Link
from paceline.core.errors import CommunicationTimeout, PacelineError
from paceline.core.world import World
from paceline.data.epochs import Epochs, NumberedData, epochs_of, num_left, source_of
from paceline.data.feeds.base import Feed, PlanStep
from paceline.data.feeds.coordinated import Course, Inline, OwnParts, Planned, ReadByOne, TogetherFeed, WatchedLink
from paceline.data.feeds.readers import ReaderProcesses, Readers, ReaderThread, ReaderTimeout
from paceline.data.feeds.resident import resident
from paceline.data.feeds.sharded import ShardedFeed, counts_samples, reader_of
from paceline.data.sources.base import Read, Source, as_source
from paceline.data.sources.batches import BatchStream
from paceline.data.sources.streams import IterableStream, Slot, StreamReader
from paceline.plan.steps import Position, Steps

Way: TypeAlias = Literal["sharded", "dispatched"]

# Steps that are planned and read ahead where workers read together.
AHEAD = 2
# For a link that is used ahead of time, which rests for as long as training does: in an evaluation, say. Whoever needs
# what it brings waits timeout_s for that, and no longer.
NO_LIMIT_S = 7 * 24 * 3600.0

# Makes the link of a world; a message on it takes at most so many seconds, its construction at most the second number.
Connect: TypeAlias = Callable[[World, float, float], Link]


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
    resident: bool = False


def as_data(data: Any, *, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> Source | IterableStream:
    """What the user passed as `data`: samples with numbers, or a stream of them."""
    has_numbers = hasattr(data, "__len__") and (hasattr(data, "__getitem__") or hasattr(data, "read"))
    # Every torch Dataset has __getitem__, one that is only iterable in name.
    is_iterable_only = isinstance(data, IterableDataset) or (not has_numbers and hasattr(data, "__iter__"))
    return IterableStream(data, seed) if is_iterable_only else as_source(data, collate_fn=collate_fn, seed=seed)


def link_of_its_own(world: World, timeout_s: float, join_timeout_s: float) -> Link:
    # Imported here: a world of one should not pay for torch.distributed.
    if world.local_size == world.size:
        from paceline.comm.host_link import HostLink

        return HostLink(world, timeout_s, join_timeout_s)
    from paceline.comm.process_group import ProcessGroupCommunicator
    from paceline.comm.rendezvous import Rendezvous

    return ProcessGroupCommunicator(world, "gloo", timeout_s, Rendezvous(world, join_timeout_s))


def make_feed(
    data: NumberedData | IterableStream,
    settings: DataSettings,
    steps: Steps,
    plan_step: PlanStep,
    communicator: Communicator,
    connect: Connect = link_of_its_own,
) -> Feed:
    """The feed for this data. What cannot be is refused before anything is started.

    `connect` makes the link that workers who read together need, where there are several.
    """
    if isinstance(data, IterableStream):
        parts = _StreamParts(stream_reader(data, settings, steps))
        return _together(parts, data, _StreamCourse(), settings, plan_step, communicator, connect)
    source = source_of(data)
    if settings.resident:
        source = resident(source, communicator.world.device)
    epochs = epochs_of(data, steps, communicator, seed=settings.seed, shuffle=settings.shuffle)
    if settings.way == "dispatched":
        numbered = _NumberedParts(source, epochs, is_weighed=settings.weight_fn is not None)
        return _together(numbered, source, _SizedCourse(epochs), settings, plan_step, communicator, connect)
    return ShardedFeed(
        source,
        epochs,
        plan_step,
        communicator.world.rank,
        communicator.world.device,
        weight_fn=settings.weight_fn,
        at_once=settings.at_once,
        readers=settings.readers,
        prefetch=settings.prefetch,
        timeout_s=communicator.timeout_s,
    )


def _together(
    parts: Parts,
    data: Source | IterableStream,
    course: Course,
    settings: DataSettings,
    plan_step: PlanStep,
    communicator: Communicator,
    connect: Connect,
) -> Feed:
    if settings.at_once > 1:
        raise ValueError(
            "physical_batch needs data with numbered samples that each worker reads for itself: leave it out, or "
            "choose a larger micro_batch"
        )
    if settings.prefetch is not None:
        raise ValueError(
            f"prefetch={settings.prefetch} would be ignored: where workers read together, {AHEAD} steps are read "
            "ahead; choose readers instead"
        )
    world, timeout_s = communicator.world, communicator.timeout_s
    runs_beside = settings.readers > 0 or getattr(data, "may_read_in_thread", False)
    # A step that waits for data waits timeout_s; a thread that reads ahead of it may wait until somebody needs that.
    limit_s = NO_LIMIT_S if runs_beside else timeout_s
    with ExitStack() as undo:
        reading = _Reading(parts, settings.readers, limit_s)
        undo.callback(reading.close)
        link = WatchedLink(connect(world, limit_s, timeout_s)) if world.size > 1 else None
        if link is not None:
            undo.callback(link.close)
        deliver: Callable[[Planned], Any] = OwnParts(reading.read_all, link)
        if settings.way == "dispatched" and link is not None:
            deliver = ReadByOne(reading.read_all, link)
        give_up, explain = partial(_give_up, link, reading), partial(_explain, timeout_s, link, reading)
        readers = ReaderThread(deliver, timeout_s, give_up=give_up, explain=explain) if runs_beside else Inline(deliver)
        return TogetherFeed(
            course,
            plan_step,
            _Closing(readers, undo.pop_all()),
            world.rank,
            world.device,
            ahead=AHEAD if runs_beside else 0,
            knows_weights=not counts_samples(data),
            weight_fn=settings.weight_fn,
            tell=getattr(data, "tell", None),
        )


def _give_up(link: WatchedLink | None, reading: _Reading) -> None:
    if link is not None:
        link.abort()
    reading.kill()


def _explain(timeout_s: float, link: WatchedLink | None, reading: _Reading) -> PacelineError | None:
    """Why a step waits in vain for what is read ahead of it, if it is another worker or a reader process."""
    if link is not None and link.doing:
        return CommunicationTimeout(
            f"rank {link.world.rank} waited timeout_s={timeout_s:g} s for its data, in {link.doing}: that rank hangs, "
            "or its work takes longer than the time-out"
        )
    return ReaderTimeout.of_stacks(timeout_s, stacks) if (stacks := reading.stacks()) else None


class Parts(Protocol):
    """How micro-batches are asked for: `read` is called with a request, here or in a reader process."""

    @property
    def read(self) -> Callable[[Any], Read]: ...

    def requests(self, planned: Planned, numbers: range, num_readers: int) -> list[tuple[Any, int | None]]:
        """A request for each of these micro-batches of a step, and the reader that should answer it, if it matters."""


class _NumberedParts:
    def __init__(self, source: Source, epochs: Epochs, *, is_weighed: bool) -> None:
        self.read = reader_of(source, is_weighed=is_weighed)
        self._epochs = epochs

    def requests(self, planned: Planned, numbers: range, num_readers: int) -> list[tuple[Any, int | None]]:
        epoch = self._epochs.known(planned.epoch)
        assert epoch is not None, "a step is planned only in epochs whose order is known"
        return [(epoch.request(planned.first + k, 1), None) for k in numbers]


class _StreamParts:
    def __init__(self, read: StreamReader) -> None:
        self.read = read

    def requests(self, planned: Planned, numbers: range, num_readers: int) -> list[tuple[Any, int | None]]:
        slots = [Slot(planned.epoch, planned.first + k) for k in numbers]
        return [(slot, self.read.reader_of(slot, num_readers) if num_readers else None) for slot in slots]


class _Reading:
    """Reads micro-batches of a planned step: here, or in processes."""

    def __init__(self, parts: Parts, num_readers: int, timeout_s: float) -> None:
        self._parts = parts
        self._num_readers = num_readers
        self._processes = ReaderProcesses(parts.read, num_readers, timeout_s) if num_readers else None

    def read_all(self, planned: Planned, numbers: range) -> Sequence[Read]:
        requests = self._parts.requests(planned, numbers, self._num_readers)
        if self._processes is None:
            return [self._parts.read(request) for request, _ in requests]
        answers = [self._processes.submit(request, reader) for request, reader in requests]
        return [answer() for answer in answers]

    def kill(self) -> None:
        if self._processes is not None:
            self._processes.kill()

    def stacks(self) -> str:
        """Where the reader processes stand that have something to do."""
        return "" if self._processes is None else self._processes.stacks()

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
    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs

    def begin(self, epoch: int) -> None:
        self._epochs.begin(epoch)

    def num_left(self, position: Position) -> int:
        epoch = self._epochs.known(position.epoch)
        return 0 if epoch is None else num_left(epoch, position)

    def after(self, position: Position, num_micro_batches: int) -> Position:
        epoch = self._epochs.known(position.epoch)
        assert epoch is not None
        return position.after_step(num_micro_batches, epoch.steps)


class _StreamCourse:
    """Nobody knows where it ends: a step in which no micro-batch exists ends the epoch."""

    def begin(self, epoch: int) -> None:
        return

    def num_left(self, position: Position) -> int:
        return sys.maxsize

    def after(self, position: Position, num_micro_batches: int) -> Position:
        return Position(position.epoch, position.micro_batch + num_micro_batches, position.step + 1)


def stream_reader(stream: IterableStream, settings: DataSettings, steps: Steps) -> StreamReader:
    """What reads a stream's micro-batches by their numbers."""
    if isinstance(stream, BatchStream):
        return StreamReader(
            stream,
            1,
            stream.num_shards,
            seed=settings.seed,
            in_a_row=steps.max_micro_batches // stream.num_shards,
            as_read=partial(stream.as_read, is_weighed=settings.weight_fn is not None),
        )
    return StreamReader(
        stream,
        steps.micro_batch,
        _checked_shards(settings.num_shards, stream, steps),
        seed=settings.seed,
        shuffle_buffer=settings.shuffle_buffer,
        collate_fn=settings.collate_fn,
        is_weighed=settings.weight_fn is not None,
    )


def _checked_shards(num_shards: int | None, stream: IterableStream, steps: Steps) -> int:
    """A step takes equally many micro-batches of every shard, so that one without any ends the epoch.

    By default as many as the stream can really be divided into: of one that cannot, every shard would read everything.
    """
    per_step = steps.max_micro_batches
    if num_shards is None:
        return math.gcd(per_step, stream.num_own_shards)
    if num_shards < 1 or per_step % num_shards:
        divisors = [d for d in range(1, per_step + 1) if per_step % d == 0]
        raise ValueError(
            f"num_shards={num_shards} does not divide the {per_step} micro-batches of a step: choose one of "
            f"{', '.join(map(str, divisors))}"
        )
    return num_shards
