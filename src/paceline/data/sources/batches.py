"""Data that comes as whole batches: each is one micro-batch, of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.generators import host_randomness
from paceline.core.seeding import Purpose, derive_seed
from paceline.data.errors import UserCode
from paceline.data.sources.base import Indices, Read, WrappedData
from paceline.data.sources.collate import as_pair, count_rows


class Batches:
    """An iterable of finished batches, such as the loader of another library or a generator function.

    Each item is one micro-batch; `batches_per_step` consecutive ones make a step. Rank 0 reads them and sends each
    worker its own. With `feed="sharded"` every worker reads all of them and keeps its own. A batch weighs its number of
    samples, the rows that its tensors, arrays and lists agree on, unless there is a `weight_fn`.

    Args:
        iterable: an object that restarts whenever it is iterated over, or a function that returns an iterator.
            It must give the same batches each time it is started for the same epoch. Python's, NumPy's and torch's
            generators are seeded by (seed, epoch, batch) while it runs, and `set_epoch` is called if it exists, also
            of a DataLoader's data set and samplers.
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


@dataclass(eq=False)
class WholeBatches(WrappedData):
    """A data set whose items are already batches: each index is one micro-batch."""

    counts_samples = True

    _data: Any
    convert: Callable[[Any], Any]
    seed: int

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        return self.read_counted(indices, epoch, position, is_weighed=True).batch

    def read_counted(self, indices: Indices, epoch: int, position: int, *, is_weighed: bool = False) -> Read:
        (index,) = indices.tolist()
        with host_randomness() as randomness, UserCode("reading batch {} of the data set", index):
            randomness.seed(derive_seed(self.seed, Purpose.SAMPLE, epoch, index))
            batch = as_pair(self.convert(self._data[index]))
            return Read(batch, num_samples_of(batch, is_weighed=is_weighed))


def num_samples_of(batch: Any, *, is_weighed: bool = False) -> int:
    """The rows of a batch; 1 if they cannot be counted and a weight_fn weighs it."""
    try:
        num_rows = count_rows(batch)
    except TypeError:
        if not is_weighed:
            raise
        return 1
    if not num_rows:
        raise ValueError("a batch has no sample, since its tensors have no rows: leave such batches out")
    return num_rows


def is_function(iterable: Any) -> bool:
    """Whether it is a function that returns an iterator."""
    return callable(iterable) and not hasattr(iterable, "__iter__")


def _restartable(iterable: Any, name: str) -> Any:
    if is_function(iterable) or (isinstance(iterable, Iterable) and not isinstance(iterable, Iterator)):
        return iterable
    problem = "can be read only once" if isinstance(iterable, Iterator) else "is not iterable"
    raise TypeError(
        f"{name} got a {type(iterable).__name__}, which {problem}: pass a function that returns an iterator, or an "
        "object that restarts when it is iterated over"
    )
