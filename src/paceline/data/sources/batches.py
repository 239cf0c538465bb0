"""Data that comes as whole batches: each is one micro-batch, of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from paceline.core.seeding import Purpose, derive_seed, host_randomness
from paceline.data.errors import UserCode
from paceline.data.fingerprint import Facts, facts_of
from paceline.data.rows import count_rows
from paceline.data.sources.base import Indices, Read
from paceline.data.sources.collate import as_pair
from paceline.data.sources.streams import IterableStream, seeded, stream_facts


class Batches:
    """An iterable of finished batches, such as the loader of another library or a generator function.

    Each item is one micro-batch; `batches_per_step` consecutive ones make a step. Rank 0 reads them and sends each
    worker its own. With `feed="sharded"` every worker reads all of them and keeps its own. A batch weighs its number of
    samples, the rows that its tensors, arrays and lists agree on, unless there is a `weight_fn`.

    Args:
        iterable: an object that restarts whenever it is iterated over, or a function that returns an iterator.
            It must give the same batches each time it is started for the same epoch. Python's, NumPy's and torch's
            generators are seeded by (seed, epoch, batch) while it runs, and `set_epoch` is called if it exists.
    """

    def __init__(self, iterable: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        self.iterables: Sequence[Any] = (_restartable(iterable, "Batches"),)


class PerWorker:
    """N iterables of batches, one per worker, read in parallel.

    Each iterable gives an equal part of every step: with N iterables and B batches per step, iterable i gives the i-th
    B/N of them, in its order. This holds for any number of workers, so the result does not depend on it. With N workers
    and equal shares each worker reads only its own iterable; a worker that computes a batch of another iterable also
    reads that one up to it. An iterable that ends before the others leaves its batches of a step missing.

    Args:
        iterables: as for `Batches`, each with different samples.
    """

    def __init__(self, iterables: Sequence[Iterable[Any] | Callable[[], Iterable[Any]]]) -> None:
        if not iterables:
            raise ValueError("PerWorker got no iterables: give one per worker")
        self.iterables: Sequence[Any] = tuple(_restartable(iterable, "PerWorker") for iterable in iterables)


class BatchStream(IterableStream):
    """Iterables of batches as the shards of one stream."""

    def __init__(self, iterables: Sequence[Iterable[Any]], seed: int, convert: Callable[[Any], Any] | None = None):
        self._iterables = iterables
        self._seed = seed
        self._convert = convert

    @property
    def num_shards(self) -> int:
        return len(self._iterables)

    def fingerprint(self) -> Facts:
        return stream_facts(self._iterables)

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        assert num_shards == self.num_shards
        batches = self._iterables[shard]
        if hasattr(batches, "set_epoch"):
            batches.set_epoch(epoch)
        # One seed per shard, or all shards would draw the same augmentations.
        return seeded(batches, derive_seed(self._seed, Purpose.SAMPLE_BLOCK, shard), epoch, what="batch")

    def as_read(self, batch: Any, *, is_weighed: bool) -> Read:
        """A batch as it is trained, with its number of samples."""
        batch = as_pair(batch if self._convert is None else self._convert(batch))
        return Read(batch, num_samples_of(batch, is_weighed=is_weighed))


class WholeBatches:
    """A data set whose items are already batches: each index is one micro-batch."""

    counts_samples = True

    def __init__(self, items: Any, convert: Callable[[Any], Any], seed: int) -> None:
        self._items = items
        self._convert = convert
        self._seed = seed

    def __len__(self) -> int:
        return len(self._items)

    def fingerprint(self) -> Facts:
        return facts_of(self._items)

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        return self.read_counted(indices, epoch, position, is_weighed=True).batch

    def read_counted(self, indices: Indices, epoch: int, position: int, *, is_weighed: bool = False) -> Read:
        (index,) = indices.tolist()
        with host_randomness() as randomness, UserCode("reading batch {} of the data set", index):
            randomness.seed(derive_seed(self._seed, Purpose.SAMPLE, epoch, index))
            batch = as_pair(self._convert(self._items[index]))
            return Read(batch, num_samples_of(batch, is_weighed=is_weighed))


def num_samples_of(batch: Any, *, is_weighed: bool = False) -> int:
    """The rows of a batch. If a weight_fn weighs it, 1 where they cannot be counted."""
    try:
        num_rows = count_rows(batch)
    except TypeError:
        if not is_weighed:
            raise
        return 1
    if not num_rows:
        raise ValueError("a batch has no sample, since its tensors have no rows: leave such batches out")
    return num_rows


class _FunctionIterable:
    """A function that returns iterators, as an iterable."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())

    def fingerprint(self) -> Facts:
        return facts_of(self._make)


def _restartable(iterable: Any, name: str) -> Iterable[Any]:
    if not hasattr(iterable, "__iter__"):
        if callable(iterable):
            return _FunctionIterable(iterable)
        raise TypeError(f"{name} got a {type(iterable).__name__}, which is not iterable: pass an iterable of batches")
    if isinstance(iterable, Iterator):
        raise TypeError(
            f"{name} got a {type(iterable).__name__}, which can be read only once: pass the function that makes it, "
            "or an object that restarts when it is iterated over"
        )
    return iterable  # type: ignore[no-any-return]
