"""Data without numbers: samples that come one after another, from an iterable that can be started again.

The order of a stream is that of a fixed number of virtual shards, whoever reads them: they give micro-batches in turn,
each the next `micro_batch` samples of its shard. A shard that has ended leaves its places empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

from paceline.core.mixing import mix64
from paceline.core.seeding import Purpose, derive_seed, host_randomness
from paceline.data.errors import ended_by_stop_iteration
from paceline.data.fingerprint import Facts, facts_of_several
from paceline.data.sources.base import Read, collate, counted
from paceline.data.sources.collate import join


class Stream(Protocol):
    """Where samples come from. Called with the same arguments, `open` gives the same samples."""

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        """A shard's samples, from the first on. Every sample of the epoch is in exactly one shard."""


class IterableStream:
    """Anything that can be iterated over again and again: a torch IterableDataset, an HF one, a file-like of yours.

    One that can divide itself (`shard(num_shards=, index=)`, as HF data sets by their files) does; of any other, every
    shard reads everything and keeps every num_shards-th sample. `set_epoch` is called where there is one.
    """

    def __init__(self, samples: Iterable[Any], seed: int = 0) -> None:
        if iter(samples) is samples:
            raise TypeError(
                f"data is a {type(samples).__name__}, which can be read only once: pass something that starts again "
                "when it is iterated over, such as a torch IterableDataset, or a list"
            )
        self._samples = samples
        self._seed = seed

    def fingerprint(self) -> Facts:
        return stream_facts([self._samples])

    @property
    def num_own_shards(self) -> int:
        """Into how many parts the samples can divide themselves; 1 if they cannot."""
        own = getattr(self._samples, "num_shards", None)
        return own if isinstance(own, int) and own > 0 and callable(getattr(self._samples, "shard", None)) else 1

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        samples = self._samples
        if hasattr(samples, "set_epoch"):
            samples.set_epoch(epoch)
        if num_shards > 1 and self.num_own_shards % num_shards == 0:
            samples, shard, num_shards = samples.shard(num_shards=num_shards, index=shard), 0, 1  # type: ignore[attr-defined]
        return islice(seeded(samples, self._seed, epoch), shard, None, num_shards)


def stream_facts(iterables: Sequence[Iterable[Any]]) -> Facts:
    """What is known of what samples come from; reading some of them could take any time."""
    facts = facts_of_several(iterables)
    is_unknown = all(key.rpartition(".")[2] == "type" for key in facts)
    return facts | {"unchecked": "a stream without a fingerprint"} if is_unknown else facts


def seeded(samples: Iterable[Any], seed: int, epoch: int, what: str = "sample") -> Iterator[Any]:
    """The samples, each produced with the random generators seeded for it; inside `host_randomness`."""
    _seed_for(seed, epoch, -1)
    try:
        iterator = iter(samples)
    except StopIteration as error:
        raise ended_by_stop_iteration(f"starting the stream in epoch {epoch}") from error
    for position in count():
        _seed_for(seed, epoch, position)
        try:
            yield next(iterator)
        except StopIteration:
            return
        except Exception as error:
            error.add_note(f"while reading {what} {position} of the stream in epoch {epoch}")
            raise


def _seed_for(seed: int, epoch: int, position: int) -> None:
    from paceline.core.seeding import HostRandomness

    HostRandomness().seed(derive_seed(seed, Purpose.SAMPLE, epoch, position))


class ShuffleBuffer:
    """The samples of an iterator, each drawn at random from the next `size` of them.

    The draws depend on `seed` alone, so where a run stands is known from the number of samples it took: `skip` finds
    what the buffer would hold by numbers, and reads only that.
    """

    def __init__(self, samples: Iterator[Any], size: int, seed: int, skip: int = 0) -> None:
        self._samples = samples
        self._seed = seed
        self._drawn = skip
        # Simulated with positions instead of samples: every draw is replaced by the next position.
        held = list(range(size))
        for draw in range(skip):
            held[self._draw(draw, size)] = size + draw
        wanted = set(held)
        found = {p: sample for p, sample in enumerate(islice(samples, size + skip)) if p in wanted}
        self._buffer = [found[p] for p in held if p in found]
        # Near the end of the samples the buffer shrinks instead, and positions no longer tell which is where.
        self._is_whole = len(self._buffer) == size

    @property
    def is_exact(self) -> bool:
        return self._is_whole

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._buffer:
            raise StopIteration
        chosen = self._draw(self._drawn, len(self._buffer))
        self._drawn += 1
        sample = self._buffer[chosen]
        try:
            self._buffer[chosen] = next(self._samples)
        except StopIteration:
            self._buffer[chosen] = self._buffer[-1]
            self._buffer.pop()
        return sample

    def _draw(self, number: int, size: int) -> int:
        return mix64(self._seed ^ mix64(number)) % size


class Slot(NamedTuple):
    """A micro-batch of a stream's epoch, by its number."""

    epoch: int
    number: int


class StreamReader:
    """Reads micro-batches of a stream by number; cheap where a shard's come in order, as they do in a run.

    A shard gives `in_a_row` micro-batches before the next one's turn. `as_read`: the stream's items are batches
    already, of which this makes what was read.
    """

    def __init__(
        self,
        stream: Stream,
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
        self._cursors: dict[int, _Cursor] = {}

    def __call__(self, slot: Slot) -> Read:
        with host_randomness() as randomness:
            samples = self._samples(slot)
            if not samples:
                return Read(None, 0, exists=False)
            randomness.seed(derive_seed(self._seed, Purpose.SAMPLE_BLOCK, slot.epoch, slot.number))
            if self._as_read is not None:
                return _noting(self._as_read, samples[0], slot)
            first = self._place(slot.number)[0] * self._micro_batch
            batch = join(self._collate or collate, samples, range(first, first + len(samples)))
            if self._collate is None:
                return Read(batch, len(samples))
            return counted(batch, samples, is_weighed=self._is_weighed)

    def reader_of(self, slot: Slot, num_readers: int) -> int:
        """Which of several readers should read it: a shard stays with one, which then need not skip."""
        return self._place(slot.number)[1] % num_readers

    def _place(self, number: int) -> tuple[int, int]:
        """Which of its shard's micro-batches it is, and the shard."""
        turn, in_turn = divmod(number, self._in_a_row)
        round_number, shard = divmod(turn, self._num_shards)
        return round_number * self._in_a_row + in_turn, shard

    def _samples(self, slot: Slot) -> list[Any]:
        if slot.epoch != self._epoch:
            self._epoch, self._cursors = slot.epoch, {}
        ordinal, shard = self._place(slot.number)
        cursor = self._cursors.get(shard)
        if cursor is None or cursor.next > ordinal:
            cursor = self._cursors[shard] = _Cursor(self._open(shard, ordinal * self._micro_batch), ordinal)
        for _ in islice(cursor.samples, (ordinal - cursor.next) * self._micro_batch):
            pass  # what others took
        cursor.next = ordinal + 1
        return list(islice(cursor.samples, self._micro_batch))

    def _open(self, shard: int, skip: int) -> Iterator[Any]:
        samples = self._stream.open(shard, self._num_shards, self._epoch)
        if not self._shuffle_buffer:
            return islice(samples, skip, None)
        seed = derive_seed(self._seed, Purpose.SHUFFLE_BUFFER, self._epoch, shard)
        shuffled = ShuffleBuffer(samples, self._shuffle_buffer, seed, skip)
        if shuffled.is_exact:
            return shuffled
        # Fewer samples than the buffer holds were left: go through them one by one.
        again = ShuffleBuffer(self._stream.open(shard, self._num_shards, self._epoch), self._shuffle_buffer, seed)
        return islice(again, skip, None)


def _noting(as_read: Callable[[Any], Read], batch: Any, slot: Slot) -> Read:
    try:
        return as_read(batch)
    except StopIteration as error:
        raise ended_by_stop_iteration(f"converting micro-batch {slot.number} of epoch {slot.epoch}") from error
    except Exception as error:
        error.add_note(f"in micro-batch {slot.number} of epoch {slot.epoch}")
        raise


class _Cursor:
    """An open shard and its next micro-batch."""

    def __init__(self, samples: Iterator[Any], next: int) -> None:
        self.samples = samples
        self.next = next
