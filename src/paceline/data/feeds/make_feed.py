"""The choice of a feed, from the kind of data and the user's settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from paceline.comm.base import Communicator, Link
from paceline.core.world import World
from paceline.data.epochs import NumberedData, epochs_of, source_of
from paceline.data.feeds.base import DataSettings as DataSettings
from paceline.data.feeds.base import Feed, PlanStep
from paceline.data.feeds.base import FeedKind as FeedKind
from paceline.data.feeds.coordinated import Connect, CoordinatedFeed
from paceline.data.feeds.sharded import Epochs, ShardedFeed, reader_of
from paceline.data.sources.base import Columns, Source, as_source
from paceline.data.sources.streams import IterableStream, StreamEpoch, StreamReader
from paceline.plan.epoch import Steps

if TYPE_CHECKING:
    from paceline.comm.rendezvous import RendezvousPoint


def as_data(data: Any, *, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> Source | IterableStream:
    """The source or stream for what the user passed as `data`."""
    return IterableStream(data, seed) if is_stream(data) else as_source(data, collate_fn=collate_fn, seed=seed)


def is_stream(data: Any) -> bool:
    """Whether the data can only be iterated over."""
    has_numbers = hasattr(data, "__len__") and (hasattr(data, "__getitem__") or hasattr(data, "read"))
    # Every torch Dataset has __getitem__, including those that can only be iterated over.
    return isinstance(data, IterableDataset) or (not has_numbers and hasattr(data, "__iter__"))


def make_link(world: World, timeout_s: float, join_timeout_s: float, at: RendezvousPoint | None = None) -> Link:
    """A link between the workers of a world, in addition to the step's exchange."""
    # Imported on demand: a world of one worker does not need torch.distributed.
    if world.local_size == world.size:
        from paceline.comm.host_link import HostLink

        return HostLink(world, timeout_s, join_timeout_s, at)
    from paceline.comm.process_group import ProcessGroupCommunicator
    from paceline.comm.rendezvous import Rendezvous

    return ProcessGroupCommunicator(world, "gloo", timeout_s, Rendezvous(world, join_timeout_s, at=at))


def make_feed(
    data: NumberedData | IterableStream,
    settings: DataSettings,
    steps: Steps,
    plan_step: PlanStep,
    communicator: Communicator,
    connect: Connect = make_link,
) -> Feed:
    """The feed for this data. Invalid settings are refused before any process or connection is started."""
    if isinstance(data, IterableStream):
        reader = StreamReader(data, settings, steps)
        return CoordinatedFeed(data, reader, Epochs(StreamEpoch), settings, plan_step, communicator, connect)
    source = source_of(data)
    if settings.resident:
        assert isinstance(source, Columns), "checked when the data was adopted"
        source = source.on(communicator.world.device)
    epochs = epochs_of(data, steps, communicator, seed=settings.seed, shuffle=settings.shuffle)
    if settings.feed == "sharded":
        return ShardedFeed(source, epochs, settings, plan_step, communicator)
    read = reader_of(source, is_weighed=settings.weight_fn is not None)
    return CoordinatedFeed(source, read, epochs, settings, plan_step, communicator, connect)
