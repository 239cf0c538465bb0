"""Streams: samples without numbers, from an iterable that can be restarted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Protocol, runtime_checkable

from paceline.core.mixing import mix64
from paceline.core.seeding import HostRandomness, Purpose, derive_seed
from paceline.data.errors import UserCode
from paceline.data.fingerprint import Facts, facts_of_several


@runtime_checkable
class ShardableStream(Protocol):
    """A stream that can divide itself, as HF iterable data sets do by their files."""

    @property
    def num_shards(self) -> int:
        """The number of parts that it consists of."""

    def shard(self, num_shards: int, index: int) -> Iterable[Any]:
        """One of `num_shards` shards, a divisor of the number of parts. Every sample is in exactly one shard."""


class IterableStream:
    """An iterable that can be iterated over again and again: a torch or HF IterableDataset, or a user's class.

    A `ShardableStream` is divided by its own `shard`. Otherwise every shard reads everything and keeps every
    num_shards-th sample. `set_epoch(epoch)` is called before an epoch is read, if it exists.
    """

    def __init__(self, samples: Iterable[Any], seed: int = 0) -> None:
        if iter(samples) is samples:
            raise TypeError(
                f"data is a {type(samples).__name__}, which can be read only once: pass an object that restarts when "
                "it is iterated over, such as a torch IterableDataset or a list"
            )
        self._samples = samples
        self._seed = seed

    def fingerprint(self) -> Facts:
        return stream_facts([self._samples])

    @property
    def num_own_shards(self) -> int:
        """The number of parts that the iterable can be divided into; 1 if it cannot be divided."""
        own = self._samples.num_shards if isinstance(self._samples, ShardableStream) else 1
        return own if isinstance(own, int) and own > 0 else 1

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        """A shard's samples from the start. Every sample of the epoch is in exactly one shard."""
        samples = self._samples
        if hasattr(samples, "set_epoch"):
            samples.set_epoch(epoch)
        if num_shards > 1 and self.num_own_shards % num_shards == 0 and isinstance(samples, ShardableStream):
            samples, shard, num_shards = samples.shard(num_shards=num_shards, index=shard), 0, 1
        return islice(seeded(samples, self._seed, epoch), shard, None, num_shards)


def stream_facts(iterables: Sequence[Iterable[Any]]) -> Facts:
    """The fingerprint of streams. No sample is read, since that could take any time."""
    facts = facts_of_several(iterables)
    is_unknown = all(key.rpartition(".")[2] == "type" for key in facts)
    return facts | {"unchecked": "a stream without a fingerprint"} if is_unknown else facts


def seeded(samples: Iterable[Any], seed: int, epoch: int, what: str = "sample") -> Iterator[Any]:
    """The samples, each produced with the random generators seeded for it. Use inside `host_randomness`."""
    randomness, end = HostRandomness(), object()
    randomness.seed(derive_seed(seed, Purpose.SAMPLE, epoch, -1))
    with UserCode("starting the stream in epoch {}", epoch):
        iterator = iter(samples)
    for position in count():
        randomness.seed(derive_seed(seed, Purpose.SAMPLE, epoch, position))
        with UserCode("reading {} {} of the stream in epoch {}", what, position, epoch):
            sample = next(iterator, end)
        if sample is end:
            return
        yield sample


def shuffled(samples: Iterator[Any], size: int, seed: int) -> Iterator[Any]:
    """The samples of an iterator, each drawn at random from the next `size` of them. The draws depend on `seed`."""
    buffer = list(islice(samples, size))
    for number in count():
        if not buffer:
            return
        chosen = mix64(seed ^ mix64(number)) % len(buffer)
        sample = buffer[chosen]
        try:
            buffer[chosen] = next(samples)
        except StopIteration:
            buffer[chosen] = buffer[-1]
            buffer.pop()
        yield sample
