"""The interface of sources, and the sources for lists, tensors, arrays and map-style data sets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from os import PathLike
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from paceline.core.generators import host_randomness
from paceline.core.seeding import Purpose, derive_seed
from paceline.data.errors import UserCode
from paceline.data.fingerprint import Facts, facts_of, is_hf_dataset, tensor_facts
from paceline.data.sources.collate import Pair as Pair
from paceline.data.sources.collate import Read as Read
from paceline.data.sources.collate import counted, join
from paceline.plan.epoch import Indices as Indices

Collate = Callable[[list[Any]], Any]

_MAX_SHOWN = 8  # parts of the data in an error message


class Source(Protocol):
    """Samples with numbers. What `read` returns must depend on its arguments alone.

    A source may also implement `ThreadReadable`, `CountedSource`, `SeededSource`, `ReportsSkipped` and
    `paceline.data.fingerprint.HasFingerprint`; see docs/data.md.
    """

    def __len__(self) -> int: ...

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        """These samples as one micro-batch on the host. `position`: where it starts in the epoch's order."""


@runtime_checkable
class ThreadReadable(Protocol):
    """A source that a thread may read while the step runs."""

    @property
    def may_read_in_thread(self) -> bool:
        """Whether reading waits for I/O and runs no user code, which could draw random numbers."""


@runtime_checkable
class CountedSource(Protocol):
    """A source whose micro-batches may hold more or fewer samples than requested."""

    @property
    def counts_samples(self) -> bool:
        """Whether they may. If not, only `read` is called."""

    def read_counted(self, indices: Indices, epoch: int, position: int, *, is_weighed: bool = False) -> Read:
        """The micro-batch with its number of samples, which may be any number if `is_weighed`: a weight_fn decides."""


@runtime_checkable
class SeededSource(Protocol):
    """A source that draws random numbers by the run's seed."""

    def with_seed(self, seed: int) -> Source:
        """This source for a run with that seed."""


@runtime_checkable
class ReportsSkipped(Protocol):
    """A source that skips bad samples and reports them in the worker, wherever they were read."""

    def report_skipped(self, skipped: Sequence[Any]) -> None:
        """Called with `Read.skipped` of each micro-batch that the worker takes."""


def counts_samples(source: object) -> bool:
    """Whether the number of samples of a micro-batch is known only after reading."""
    return isinstance(source, CountedSource) and source.counts_samples


def reads_in_thread(source: object) -> bool:
    return isinstance(source, ThreadReadable) and source.may_read_in_thread


class Seeded:
    """Base of sources that draw random numbers: by their own seed if they were given one, else by the run's."""

    def __init__(self, seed: int | None) -> None:
        self._own_seed = seed
        self._seed = 0 if seed is None else seed

    def with_seed(self, seed: int) -> Self:
        if self._own_seed is not None:
            return self
        seeded = copy(self)
        seeded._seed = seed
        return seeded


class WrappedData:
    """Base of sources that read from other data, which has their length and fingerprint."""

    _data: Any

    def __len__(self) -> int:
        return len(self._data)

    def fingerprint(self) -> Facts:
        return facts_of(self._data)


class Columns:
    """Tensors or arrays with one row per sample: a tensor, or a tuple or dict of them. Reading is one gather each."""

    def __init__(self, columns: Any) -> None:
        self._pack: Callable[[list[torch.Tensor]], Any]
        if isinstance(columns, Mapping):
            names, arrays = list(columns), list(columns.values())
            self._pack = lambda parts: dict(zip(names, parts, strict=True))
        else:
            arrays = list(columns) if isinstance(columns, tuple) else [columns]
            names = [*map(str, range(len(arrays)))]
            self._pack = _packer_of(columns) if isinstance(columns, tuple) else itemgetter(0)
        self._names, self._tensors = names, [*map(_as_tensor, arrays)]
        lengths = [*map(len, self._tensors)]
        if len(set(lengths)) > 1:
            raise ValueError(f"the columns of data have {lengths} rows: all columns need the same number of rows")
        # `index_select` takes half the time of indexing, but would undo channels_last. NumPy's `take` is faster still,
        # but its memory is not aligned to 64 bytes, and kernels may then round differently.
        self._gathers = [partial(t.index_select, 0) if t.is_contiguous() else t.__getitem__ for t in self._tensors]
        self._is_on_host = all(tensor.is_cpu for tensor in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors[0])

    def fingerprint(self) -> Facts:
        return tensor_facts(dict(zip(self._names, self._tensors, strict=True)))

    def on(self, device: torch.device) -> Columns:
        """The same columns on this device. Raises MemoryError before copying if they do not fit."""
        needed = sum(tensor.nbytes for tensor in self._tensors if tensor.device != device)
        if device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(device)[0]):
            raise MemoryError(
                f"resident=True needs {needed / 2**30:.2f} GiB on {device} for the data, but only "
                f"{free / 2**30:.2f} GiB are free: leave it out, or use smaller data"
            )
        return Columns(self._pack([tensor.to(device) for tensor in self._tensors]))

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        index = torch.from_numpy(indices)
        if self._is_on_host:
            return self._pack([gather(index) for gather in self._gathers])
        pinned = index.pin_memory()  # a copy from pageable memory would wait for the device
        index_on = {device: pinned.to(device, non_blocking=True) for device in {t.device for t in self._tensors}}
        return self._pack([gather(index_on[t.device]) for gather, t in zip(self._gathers, self._tensors, strict=True)])


class CollatingSource(Seeded):
    """Base of sources that join samples by a collate function: torch's, or the user's, which may leave some out."""

    def __init__(self, collate_fn: Collate | None, seed: int | None) -> None:
        super().__init__(seed)
        self._collate_fn = collate_fn

    @property
    def counts_samples(self) -> bool:
        return self._collate_fn is not None

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        return self._fetch_and_join(indices, epoch, position)[0]

    def read_counted(self, indices: Indices, epoch: int, position: int, *, is_weighed: bool = False) -> Read:
        return counted(*self._fetch_and_join(indices, epoch, position), is_weighed=is_weighed)

    def _fetch_and_join(self, indices: Indices, epoch: int, position: int) -> tuple[Any, list[Any]]:
        """The micro-batch, and the samples it was made of."""
        raise NotImplementedError

    def _join(self, samples: list[Any], indices: list[int]) -> tuple[Any, list[Any]]:
        return join(self._collate_fn, samples, indices), samples


class Samples(WrappedData, CollatingSource):
    """Samples that are fetched one by one, or together by `__getitems__` if the data set has it, then collated.

    User code may draw random numbers: Python's, NumPy's and torch's generators are seeded by (seed, epoch, sample), or
    by the micro-batch's position where samples are fetched or collated together.
    """

    def __init__(self, samples: Any, collate_fn: Collate | None, seed: int) -> None:
        super().__init__(collate_fn, seed)
        self._data = samples
        self._runs_user_code = collate_fn is not None or not _is_plain(samples)
        self._fetch_together = getattr(samples, "__getitems__", None)

    def _fetch_and_join(self, indices: Indices, epoch: int, position: int) -> tuple[Any, list[Any]]:
        wanted = indices.tolist()
        if not self._runs_user_code:
            return self._join([self._data[i] for i in wanted], wanted)
        block_seed = derive_seed(self._seed, Purpose.SAMPLE_BLOCK, epoch, position)
        with host_randomness() as randomness:
            if self._fetch_together is not None:
                randomness.seed(block_seed)
                with UserCode("reading samples {} of the data set", wanted):
                    fetched = self._fetch_together(wanted)
                if len(fetched) != len(wanted):
                    raise ValueError(
                        f"__getitems__ of the data set returned {len(fetched)} samples for {len(wanted)} indices: "
                        "return one for each; to leave some out, give a collate_fn that does"
                    )
                return self._join(fetched, wanted)
            fetched = []
            for i in wanted:
                randomness.seed(derive_seed(self._seed, Purpose.SAMPLE, epoch, i))
                with UserCode("reading sample {} of the data set", i):
                    fetched.append(self._data[i])
            randomness.seed(block_seed)
            return self._join(fetched, wanted)


@dataclass(eq=False)
class Cycle(WrappedData):
    """Batches, or single samples, in a fixed order, repeated up to `length`; they are not collated.

    Random numbers are seeded as in `Samples`; every pass over the items counts as an epoch.
    """

    _data: Sequence[Any]
    length: int
    seed: int

    def __len__(self) -> int:
        return self.length

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        (index,) = indices.tolist()
        pass_number, item = divmod(index, len(self._data))
        if _is_plain(self._data):
            return self._data[item]
        with host_randomness() as randomness:
            randomness.seed(derive_seed(self.seed, Purpose.SAMPLE, pass_number, item))
            with UserCode("reading sample {} of the data set", item):
                return self._data[item]


def as_source(data: Any, *, collate_fn: Collate | None = None, seed: int = 0) -> Source:
    """The source for `data` with numbered samples, in any of the forms that `Trainer.setup` takes."""
    if is_hf_dataset(data) and collate_fn is None:
        from paceline.data.sources.arrow import HfTable, is_plain_table  # not at the top: it builds on this module

        data = HfTable(data) if is_plain_table(data) else data
    if type(data) is TensorDataset and collate_fn is None:  # a subclass may do more than index
        data = tuple(data.tensors)
    source: Source
    if isinstance(data, Columns) or _is_columns(data):
        if collate_fn is not None:
            raise ValueError(
                "collate_fn joins samples, but data is given as whole columns: pass a list of samples or a data set"
            )
        source = data if isinstance(data, Columns) else Columns(data)
    # A data set with items may have a method `read` too.
    elif hasattr(data, "read") and hasattr(data, "__len__") and not hasattr(data, "__getitem__"):
        if collate_fn is not None:
            raise ValueError(
                f"collate_fn joins samples, but data is a {type(data).__name__}, which gives whole micro-batches: "
                "give collate_fn to the source, if it takes one"
            )
        source = data.with_seed(seed) if isinstance(data, SeededSource) else data
    elif isinstance(data, str | bytes | PathLike):
        raise TypeError(
            f"data is {data!r}: for files pass a source, such as ArrowSource, TokenFile or ImageFolder of paceline.data"
        )
    elif type(data).__module__.partition(".")[0] in ("pandas", "polars"):  # indexed by column
        raise TypeError(
            f"data is a {type(data).__name__}: pass its columns as arrays of numbers, such as "
            "{name: data[name].to_numpy() for name in data.columns}, or a list of samples"
        )
    elif not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise TypeError(
            f"data is a {type(data).__name__}, which has no __getitem__ and __len__: pass a list of samples, "
            "tensors or arrays, or a map-style torch Dataset"
        )
    else:
        source = Samples(data, collate_fn, seed)
    if len(source) == 0:
        raise ValueError("data is empty: give at least one sample")
    return source


def _is_plain(samples: Any) -> bool:
    """Whether indexing runs no user code, so that no random numbers are drawn."""
    return type(samples) in (list, tuple, torch.Tensor, np.ndarray)


def _is_columns(data: Any) -> bool:
    if isinstance(data, torch.Tensor | np.ndarray):
        return True
    if not isinstance(data, tuple | Mapping):
        return False
    parts = list(data.values()) if isinstance(data, Mapping) else data
    if not all(isinstance(part, torch.Tensor | np.ndarray) and part.ndim > 0 for part in parts):
        kinds = [type(part).__name__ for part in parts[:_MAX_SHOWN]] + ["..."] * (len(parts) > _MAX_SHOWN)
        raise TypeError(
            f"data is a {type(data).__name__} of {', '.join(kinds)}: columns must all be tensors or arrays with one "
            "row per sample; to pass single samples, put them in a list"
        )
    return bool(parts)


def _packer_of(columns: tuple[Any, ...]) -> Callable[[list[torch.Tensor]], Any]:
    """A named tuple keeps its type, as torch's collation does."""
    named: Callable[[list[torch.Tensor]], Any] | None = getattr(columns, "_make", None)
    return named or (Pair._make if len(columns) == 2 else tuple)


def _as_tensor(column: torch.Tensor | npt.NDArray[Any]) -> torch.Tensor:
    if column.ndim == 0:
        raise ValueError("data is a single number: it needs one row per sample")
    if isinstance(column, torch.Tensor):
        return column
    with warnings.catch_warnings():
        # A memory-mapped file may be read-only. Rows are only copied out of it.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        try:
            return torch.from_numpy(column)
        except (TypeError, ValueError) as error:  # texts, objects, foreign byte order, negative strides
            raise type(error)(
                f"data has an array of {column.dtype} that cannot become a tensor: convert it, or pass the samples as "
                f"a list ({error})"
            ) from None
