"""The choice of a feed, from the kind of data and the user's settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.data import IterableDataset

from paceline.comm.base import Communicator, Link
from paceline.core.world import World
from paceline.data.epochs import NumberedData, epochs_of, source_of
from paceline.data.feeds.base import Feed, PlanStep
from paceline.data.feeds.coordinated import STEPS_AHEAD, CoordinatedFeed, Epochs, Reading, StreamEpochs
from paceline.data.feeds.sharded import ShardedFeed, reader_of
from paceline.data.sources.base import Columns, Source, as_source
from paceline.data.sources.batches import BatchStream
from paceline.data.sources.streams import IterableStream, StreamReader
from paceline.plan.steps import Steps

FeedKind: TypeAlias = Literal["sharded", "dispatched"]

# Makes the link of a world, with the timeout of a message and that of the connection itself, in seconds.
Connect: TypeAlias = Callable[[World, float, float], Link]


@dataclass(frozen=True)
class DataSettings:
    """How the data is read; see `Trainer.setup`."""

    seed: int
    shuffle: bool
    feed: FeedKind = "sharded"
    readers: int = 0
    prefetch: int | None = None
    num_shards: int | None = None
    shuffle_buffer: int = 0
    weight_fn: Callable[[Any], int] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    at_once: int = 1
    resident: bool = False


def as_data(data: Any, *, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> Source | IterableStream:
    """The source or stream for what the user passed as `data`."""
    has_numbers = hasattr(data, "__len__") and (hasattr(data, "__getitem__") or hasattr(data, "read"))
    # Every torch Dataset has __getitem__, including those that can only be iterated over.
    is_iterable_only = isinstance(data, IterableDataset) or (not has_numbers and hasattr(data, "__iter__"))
    return IterableStream(data, seed) if is_iterable_only else as_source(data, collate_fn=collate_fn, seed=seed)


def make_link(world: World, timeout_s: float, join_timeout_s: float) -> Link:
    """A link between the workers of a world, beside the step's exchange."""
    # Imported on demand: a world of one worker does not need torch.distributed.
    if world.local_size == world.size:
        from paceline.comm.host_link import HostLink

        return HostLink(world, timeout_s, join_timeout_s)
    from paceline.comm.leaders import Leaders

    return Leaders(world, timeout_s, range(world.size), join_timeout_s)


def make_feed(
    data: NumberedData | IterableStream,
    settings: DataSettings,
    steps: Steps,
    plan_step: PlanStep,
    communicator: Communicator,
    connect: Connect = make_link,
) -> Feed:
    """The feed for this data. Invalid settings are refused before any process or connection is started."""
    world, weight_fn, timeout_s = communicator.world, settings.weight_fn, communicator.timeout_s
    is_dispatched = settings.feed == "dispatched"
    read_from: Source | IterableStream
    epochs: Epochs
    if isinstance(data, IterableStream):
        read_from, stream_reader = data, make_stream_reader(data, settings, steps)
        epochs, reading = (
            StreamEpochs(),
            Reading(stream_reader, settings.readers, is_dispatched, stream_reader.reader_of),
        )
    else:
        read_from = resident(source_of(data), world.device) if settings.resident else source_of(data)
        epochs = numbered = epochs_of(data, steps, communicator, seed=settings.seed, shuffle=settings.shuffle)
        if not is_dispatched:
            return ShardedFeed(
                read_from,
                numbered,
                plan_step,
                world.rank,
                world.device,
                weight_fn=weight_fn,
                at_once=settings.at_once,
                readers=settings.readers,
                prefetch=settings.prefetch,
                timeout_s=timeout_s,
            )
        reading = Reading(reader_of(read_from, is_weighed=weight_fn is not None), settings.readers, is_dispatched)
    if settings.at_once > 1:
        raise ValueError(
            "physical_batch needs data with numbered samples and feed='sharded': leave it out, or choose a larger "
            "micro_batch"
        )
    if settings.prefetch is not None:
        raise ValueError(
            f"prefetch={settings.prefetch} has no effect on streams and dispatched data, which are read {STEPS_AHEAD} "
            "steps ahead: set readers instead"
        )
    link = partial(connect, world)
    return CoordinatedFeed(read_from, epochs, reading, plan_step, world, link, weight_fn=weight_fn, timeout_s=timeout_s)


def make_stream_reader(stream: IterableStream, settings: DataSettings, steps: Steps) -> StreamReader:
    """Reads micro-batches of a stream by their numbers."""
    is_weighed = settings.weight_fn is not None
    if isinstance(stream, BatchStream):
        return StreamReader(
            stream,
            1,
            stream.num_shards,
            seed=settings.seed,
            in_a_row=steps.max_micro_batches // stream.num_shards,
            as_read=partial(stream.as_read, is_weighed=is_weighed),
        )
    return StreamReader(
        stream,
        steps.micro_batch,
        _checked_shards(settings.num_shards, stream, steps),
        seed=settings.seed,
        shuffle_buffer=settings.shuffle_buffer,
        collate_fn=settings.collate_fn,
        is_weighed=is_weighed,
    )


def _checked_shards(num_shards: int | None, stream: IterableStream, steps: Steps) -> int:
    """A step takes the same number of micro-batches from every shard, so that a step without any ends the epoch.

    The default is the largest number that the stream can be divided into: each shard of a stream that cannot be divided
    reads everything.
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


def resident(source: Source, device: torch.device) -> Columns:
    """The columns on the device. Raises MemoryError before copying if they do not fit."""
    columns = check_columns(source, type(source).__name__)
    needed = columns.num_bytes_missing_on(device)
    free = _free_bytes(device)
    if free is not None and needed > free:
        raise MemoryError(
            f"resident=True needs {needed / 2**30:.2f} GiB on {device} for the data, but only {free / 2**30:.2f} GiB "
            "are free: leave it out, or use smaller data"
        )
    return columns.on(device)


def check_columns(source: object, name: str) -> Columns:
    """The source, if it can be resident; `name` is the type that the user passed."""
    if not isinstance(source, Columns):
        raise ValueError(
            f"resident=True needs data as whole columns (tensors, arrays, a TensorDataset), not a {name}: leave it "
            "out, or pass the samples as tensors"
        )
    return source


def _free_bytes(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
