"""Streams: samples without numbers, from an iterable that can be restarted.

A stream is dealt into a fixed number of virtual shards, which give micro-batches in turn, each the next `micro_batch`
samples of its shard. So the order does not depend on who reads which shard. A shard that has ended leaves its
micro-batches missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

from paceline.core.mixing import mix64
from paceline.core.seeding import HostRandomness, Purpose, derive_seed, host_randomness
from paceline.data.errors import ended_by_stop_iteration
from paceline.data.fingerprint import Facts, facts_of_several
from paceline.data.sources.base import Read
from paceline.data.sources.collate import collate, counted, join


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
    randomness = HostRandomness()
    randomness.seed(derive_seed(seed, Purpose.SAMPLE, epoch, -1))
    try:
        iterator = iter(samples)
    except StopIteration as error:
        raise ended_by_stop_iteration(f"starting the stream in epoch {epoch}") from error
    for position in count():
        randomness.seed(derive_seed(seed, Purpose.SAMPLE, epoch, position))
        try:
            yield next(iterator)
        except StopIteration:
            return
        except Exception as error:
            error.add_note(f"while reading {what} {position} of the stream in epoch {epoch}")
            raise


class ShuffleBuffer:
    """The samples of an iterator, each drawn at random from the next `size` of them.

    The draws depend on `seed` alone, so the state follows from the number of samples drawn: `skip` simulates the
    draws, and keeps only the samples that the buffer would hold.
    """

    def __init__(self, samples: Iterator[Any], size: int, seed: int, skip: int = 0) -> None:
        self._samples = samples
        self._seed = seed
        self._num_drawn = skip
        # Simulated with positions instead of samples: each draw is replaced by the next position.
        held = list(range(size))
        for draw in range(skip):
            held[self._draw(draw, size)] = size + draw
        wanted = set(held)
        found = {p: sample for p, sample in enumerate(islice(samples, size + skip)) if p in wanted}
        self._buffer = [found[p] for p in held if p in found]
        # False near the end of the samples, where the buffer shrinks and the simulation does not hold.
        self.is_exact = len(self._buffer) == size

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._buffer:
            raise StopIteration
        chosen = self._draw(self._num_drawn, len(self._buffer))
        self._num_drawn += 1
        sample = self._buffer[chosen]
        try:
            self._buffer[chosen] = next(self._samples)
        except StopIteration:
            self._buffer[chosen] = self._buffer[-1]
            self._buffer.pop()
        return sample

    def _draw(self, number: int, size: int) -> int:
        return mix64(self._seed ^ mix64(number)) % size


class StreamRequest(NamedTuple):
    """A micro-batch of a stream's epoch, by its number."""

    epoch: int
    number: int


class StreamReader:
    """Reads micro-batches of a stream by number. This is cheap if those of a shard come in order, as in a run.

    A shard gives `in_a_row` micro-batches before the next shard's turn. `as_read`: converts the stream's items, if they
    are already batches.
    """

    def __init__(
        self,
        stream: IterableStream,
        micro_batch: int,
        num_shards: int,
        *,
        seed: int,
        shuffle_buffer: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        in_a_row: int = 1,
        as_read: Callable[[Any], Read] | None = None,
        is_weighed: bool = False,
    ) -> None:
        self._stream = stream
        self._micro_batch = micro_batch
        self._num_shards = num_shards
        self._seed = seed
        self._shuffle_buffer = shuffle_buffer
        self._collate = collate_fn
        self._is_weighed = is_weighed
        self._in_a_row = in_a_row
        self._as_read = as_read
        self._epoch = -1
        self._open_shards: dict[int, tuple[Iterator[Any], int]] = {}  # with the number of the next micro-batch

    def __call__(self, request: StreamRequest) -> Read:
        with host_randomness() as randomness:
            ordinal, shard = self._place(request.number)
            samples = self._samples(request.epoch, shard, ordinal)
            if not samples:
                return Read(None, 0, exists=False)
            randomness.seed(derive_seed(self._seed, Purpose.SAMPLE_BLOCK, *request))
            if self._as_read is not None:
                return _converted(self._as_read, samples[0], request)
            first = ordinal * self._micro_batch
            batch = join(self._collate or collate, samples, range(first, first + len(samples)))
            if self._collate is None:
                return Read(batch, len(samples))
            return counted(batch, samples, is_weighed=self._is_weighed)

    def reader_of(self, request: StreamRequest, num_readers: int) -> int:
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
        samples, upcoming = self._open_shards.get(shard, (iter(()), ordinal + 1))
        if upcoming > ordinal:
            samples, upcoming = self._open(shard, ordinal * self._micro_batch), ordinal
        for _ in islice(samples, (ordinal - upcoming) * self._micro_batch):
            pass  # micro-batches that other workers took
        self._open_shards[shard] = samples, ordinal + 1
        return list(islice(samples, self._micro_batch))

    def _open(self, shard: int, skip: int) -> Iterator[Any]:
        samples = self._stream.open(shard, self._num_shards, self._epoch)
        if not self._shuffle_buffer:
            return islice(samples, skip, None)
        seed = derive_seed(self._seed, Purpose.SHUFFLE_BUFFER, self._epoch, shard)
        shuffled = ShuffleBuffer(samples, self._shuffle_buffer, seed, skip)
        if shuffled.is_exact:
            return shuffled
        # Fewer samples than the buffer's size are left: draw from the start.
        again = ShuffleBuffer(self._stream.open(shard, self._num_shards, self._epoch), self._shuffle_buffer, seed)
        return islice(again, skip, None)


def _converted(as_read: Callable[[Any], Read], batch: Any, request: StreamRequest) -> Read:
    try:
        return as_read(batch)
    except StopIteration as error:
        raise ended_by_stop_iteration(f"converting micro-batch {request.number} of epoch {request.epoch}") from error
    except Exception as error:
        error.add_note(f"in micro-batch {request.number} of epoch {request.epoch}")
        raise
