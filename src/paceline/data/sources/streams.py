"""Streams: samples without numbers, from an iterable that can be restarted, and their micro-batches by number.

A stream is dealt into a fixed number of virtual shards, which give micro-batches in turn, each the next `micro_batch`
samples of its shard. So the order does not depend on which worker reads which shard. A shard that has ended leaves its
micro-batches missing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch.utils.data import DataLoader

from paceline.core.generators import HostRandomness, host_randomness
from paceline.core.seeding import Purpose, derive_seed, mix64
from paceline.data.errors import UserCode
from paceline.data.feeds.base import DataSettings
from paceline.data.feeds.sharded import Epoch
from paceline.data.fingerprint import Facts, facts_of_several
from paceline.data.sources.base import Read
from paceline.data.sources.batches import is_function, num_samples_of
from paceline.data.sources.collate import as_pair, counted, join
from paceline.plan.epoch import Position, Steps, divisors


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
        self._iterables: Sequence[Any] = [samples]
        self._seed = seed

    def fingerprint(self) -> Facts:
        """No sample is read, since that could take any time."""
        facts = facts_of_several(self._iterables)
        is_unknown = all(key.rpartition(".")[2] == "type" for key in facts)
        return facts | {"unchecked": "a stream without a fingerprint"} if is_unknown else facts

    @property
    def num_own_shards(self) -> int:
        """The number of parts that the iterable can be divided into; 1 if it cannot be divided."""
        (samples,) = self._iterables
        own = samples.num_shards if isinstance(samples, ShardableStream) else 1
        return own if isinstance(own, int) and own > 0 else 1

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        """A shard's samples from the start. Every sample of the epoch is in exactly one shard."""
        (samples,) = self._iterables
        _set_epoch(samples, epoch)
        if num_shards > 1 and self.num_own_shards % num_shards == 0 and isinstance(samples, ShardableStream):
            samples, shard, num_shards = samples.shard(num_shards=num_shards, index=shard), 0, 1
            _set_epoch(samples, epoch)  # a shard of an HF data set begins at epoch 0
        return islice(_seeded(samples, self._seed, epoch), shard, None, num_shards)


class BatchStream(IterableStream):
    """Iterables of batches as the shards of one stream."""

    def __init__(self, iterables: Sequence[Any], seed: int, convert: Callable[[Any], Any] | None = None):
        self._iterables = iterables
        self._seed = seed
        self._convert = convert

    @property
    def num_shards(self) -> int:
        return len(self._iterables)

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        assert num_shards == self.num_shards
        batches = self._iterables[shard]
        _set_epoch(batches, epoch)
        # One seed per shard, or all shards would draw the same augmentations.
        return _seeded(batches, derive_seed(self._seed, Purpose.SAMPLE_BLOCK, shard), epoch, what="batch")

    def as_read(self, batch: Any, *, is_weighed: bool) -> Read:
        """A batch as it is trained, with its number of samples."""
        batch = as_pair(batch if self._convert is None else self._convert(batch))
        return Read(batch, num_samples_of(batch, is_weighed=is_weighed))


class StreamRequest(NamedTuple):
    """A micro-batch of a stream's epoch, by its number."""

    epoch: int
    number: int


class StreamEpoch(Epoch):
    """An epoch of unknown length. A step without micro-batches ends it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def request(self, first: int, count: int = 1) -> StreamRequest:
        assert count == 1
        return StreamRequest(self.number, first)

    def num_left(self, position: Position) -> int:
        return sys.maxsize  # more than any step has

    def after(self, position: Position, num_micro_batches: int) -> Position:
        return Position(position.epoch, position.micro_batch + num_micro_batches, position.step + 1)


class StreamReader:
    """Reads micro-batches of a stream. This is cheap if a shard's micro-batches come in order, as in a run.

    The iterables of a `BatchStream` are its shards. Each gives its whole part of a step before the next one's turn.
    """

    def __init__(self, stream: IterableStream, settings: DataSettings, steps: Steps) -> None:
        self._stream = stream
        self._settings = settings
        self._is_weighed = settings.weight_fn is not None
        has_batches = isinstance(stream, BatchStream)
        self._micro_batch = 1 if has_batches else steps.micro_batch
        self._num_shards = _num_shards(stream, settings.num_shards, steps)
        self._in_a_row = steps.max_micro_batches // self._num_shards if has_batches else 1
        self._epoch = -1
        self._open_shards: dict[int, tuple[Iterator[Any], int]] = {}  # with the number of the next micro-batch

    def __call__(self, request: StreamRequest) -> Read:
        with host_randomness() as randomness:
            ordinal, shard = self._place(request.number)
            samples = self._samples(request.epoch, shard, ordinal)
            if not samples:
                return Read(None, 0, exists=False)
            randomness.seed(derive_seed(self._settings.seed, Purpose.SAMPLE_BLOCK, *request))
            if isinstance(self._stream, BatchStream):
                with UserCode("converting micro-batch {} of epoch {}", request.number, request.epoch):
                    return self._stream.as_read(samples[0], is_weighed=self._is_weighed)
            collate_fn, first = self._settings.collate_fn, ordinal * self._micro_batch
            batch = join(collate_fn, samples, [*range(first, first + len(samples))])
            if collate_fn is None:
                return Read(batch, len(samples))
            return counted(batch, samples, is_weighed=self._is_weighed)

    def process_of(self, request: StreamRequest, num_readers: int) -> int:
        """The reader process for a request. A shard stays with one process, so that none has to skip samples."""
        return self._place(request.number)[1] % num_readers

    def _place(self, number: int) -> tuple[int, int]:
        """The micro-batch's number within its shard, and the shard."""
        turn, in_turn = divmod(number, self._in_a_row)
        round_number, shard = divmod(turn, self._num_shards)
        return round_number * self._in_a_row + in_turn, shard

    def _samples(self, epoch: int, shard: int, ordinal: int) -> list[Any]:
        if epoch != self._epoch:
            self._epoch, self._open_shards = epoch, {}
        # Removed while it is read: after an error the shard is read again from its start.
        samples, upcoming = self._open_shards.pop(shard, (iter(()), ordinal + 1))
        if upcoming > ordinal:
            samples, upcoming = self._stream.open(shard, self._num_shards, epoch), 0
            if self._settings.shuffle_buffer:
                seed = derive_seed(self._settings.seed, Purpose.SHUFFLE_BUFFER, epoch, shard)
                samples = shuffled(samples, self._settings.shuffle_buffer, seed)
        for _ in islice(samples, (ordinal - upcoming) * self._micro_batch):
            pass  # micro-batches that other workers took, or that were trained before a resume
        micro_batch = list(islice(samples, self._micro_batch))
        self._open_shards[shard] = samples, ordinal + 1
        return micro_batch


def _set_epoch(samples: Any, epoch: int) -> None:
    """Of an iterable; of a DataLoader, of its data set and samplers."""
    parts = [samples]
    if isinstance(samples, DataLoader):
        parts += [samples.dataset, samples.sampler, samples.batch_sampler]
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _seeded(samples: Any, seed: int, epoch: int, what: str = "sample") -> Iterator[Any]:
    """The samples, each produced with the random generators seeded for it. Use inside `host_randomness`."""
    randomness, end = HostRandomness(), object()
    randomness.seed(derive_seed(seed, Purpose.SAMPLE, epoch, -1))
    with UserCode("starting the stream in epoch {}", epoch):
        iterator = iter(samples() if is_function(samples) else samples)
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


def _num_shards(stream: IterableStream, num_shards: int | None, steps: Steps) -> int:
    """A step takes the same number of micro-batches from every shard, so that a step without any ends the epoch.

    The default is the largest number that the stream can be divided into: each shard of a stream that cannot be divided
    reads everything.
    """
    per_step = steps.max_micro_batches
    if isinstance(stream, BatchStream):
        return stream.num_shards
    if num_shards is None:
        return math.gcd(per_step, stream.num_own_shards)
    if per_step % num_shards:
        raise ValueError(
            f"num_shards={num_shards} does not divide the {per_step} micro-batches of a step: choose one of "
            f"{', '.join(map(str, divisors(per_step)))}"
        )
    return num_shards
