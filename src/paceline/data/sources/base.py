"""One small interface over what users keep their samples in: lists, tensors, arrays, map-style datasets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset, default_collate

from paceline.core.seeding import Purpose, derive_seed, host_randomness
from paceline.data.errors import ended_by_stop_iteration
from paceline.data.fingerprint import Facts, facts_of, tensor_facts
from paceline.data.rows import count_rows
from paceline.data.sources.collate import join

Indices = npt.NDArray[np.int64]
# Brings a list of tensors to the device that they are for.
Move: TypeAlias = Callable[[list[Any]], list[Any]]


class Pair(NamedTuple):
    """A micro-batch of inputs and targets."""

    x: Any
    y: Any


class Source(Protocol):
    """Samples with numbers. What `read` returns depends on its arguments alone, whoever calls it and when.

    A source may also have `may_read_in_thread`: True where reading waits for something and runs no code of the user's;
    be a `CountedSource`; and have a `fingerprint`, see `paceline.data.fingerprint.HasFingerprint`.
    """

    def __len__(self) -> int: ...

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        """These samples as one micro-batch on the host. `position` is where it starts in the epoch's order."""


class Read(NamedTuple):
    """What reading gave: how many samples the batch holds (None: no sample is left), and those that were left out as
    bad. `exists`: False beyond the end of a stream."""

    batch: Any
    num_samples: int
    skipped: tuple[Any, ...] = ()
    exists: bool = True


@runtime_checkable
class CountedSource(Protocol):
    """A source whose micro-batches may hold another number of samples than they were asked to."""

    @property
    def counts_samples(self) -> bool:
        """Whether they may; else `read` is enough."""

    def read_counted(self, indices: Indices, epoch: int, position: int, *, is_weighed: bool = False) -> Read:
        """What `read` gives, and how many samples it holds. `is_weighed`: nobody asks how many, the user's weight_fn
        says what the batch weighs."""


def counted(batch: Any, samples: Sequence[Any], *, is_weighed: bool) -> Read:
    """What a user's collate function made of these samples; it may leave some out, even all."""
    if batch is None:
        num_rows = 0
    elif is_weighed:
        return Read(batch, len(samples))
    else:
        num_rows = count_rows(batch, samples)
    if num_rows:
        return Read(batch, num_rows)
    warnings.warn("collate_fn left no sample of a micro-batch: the step goes on without it", stacklevel=2)
    return Read(None, 0)


class Columns:
    """Tensors or arrays with one row per sample: a tensor, or a tuple or dict of them. Reading is one gather each."""

    def __init__(self, columns: Any) -> None:
        if isinstance(columns, Mapping):
            self._names: list[str] | None = list(columns)
            tensors = list(columns.values())
        else:
            self._names = None
            tensors = list(columns) if isinstance(columns, tuple) else [columns]
        self._tensors = [_as_tensor(t) for t in tensors]
        self._is_on_device = any(t.device.type != "cpu" for t in self._tensors)
        lengths = [len(t) for t in self._tensors]
        if len(set(lengths)) > 1:
            raise ValueError(f"the columns of data have {lengths} rows: they must have equally many")
        self._pack: Callable[[list[torch.Tensor]], Any]
        if self._names is not None:
            names = self._names
            self._pack = lambda parts: dict(zip(names, parts, strict=True))
        elif not isinstance(columns, tuple):
            self._pack = lambda parts: parts[0]
        else:
            self._pack = tuple if len(self._tensors) != 2 else Pair._make

    def __len__(self) -> int:
        return len(self._tensors[0])

    def fingerprint(self) -> Facts:
        """What the columns hold; see `paceline.data.fingerprint`."""
        return tensor_facts(dict(zip(self._names or map(str, range(len(self._tensors))), self._tensors, strict=True)))

    def on(self, device: torch.device) -> Columns:
        """The same columns, all of them on this device."""
        return Columns(self._pack([t.to(device) for t in self._tensors]))

    def num_bytes_missing_on(self, device: torch.device) -> int:
        """What `on` has to allocate there."""
        return sum(t.numel() * t.element_size() for t in self._tensors if t.device != device)

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        return self._pack(self._rows(indices))

    def row_bytes(self) -> list[int]:
        """The size of a sample in every column."""
        return [t[:1].numel() * t.element_size() for t in self._tensors]

    def read_parts(self, indices: Indices, num_samples: int, move: Move | None = None) -> list[Any]:
        """The samples as batches of `num_samples` each, gathered and moved at once."""
        gathered = self._rows(indices)
        # `data`: no views to autograd, so that changing one in place does not spoil another.
        parts = ([part.data for part in rows.split(num_samples)] for rows in (move(gathered) if move else gathered))
        return [self._pack(list(columns)) for columns in zip(*parts, strict=True)]

    def _rows(self, indices: Indices) -> list[torch.Tensor]:
        index = torch.from_numpy(indices)
        if not self._is_on_device:
            return [_gathered(t, index) for t in self._tensors]
        pinned = index.pin_memory()  # else the copy would wait for the device
        devices = {t.device for t in self._tensors}
        on_device = {device: pinned.to(device, non_blocking=True) for device in devices}
        return [_gathered(t, on_device[t.device]) for t in self._tensors]


def _gathered(column: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows, laid out as the column is: `index_select`, which takes half the time, would undo channels_last."""
    return column.index_select(0, index) if column.is_contiguous() else column[index]


class Samples:
    """Samples fetched one by one, or together where the data set can (`__getitems__`), then collated.

    A data set or collate function of the user's may draw random numbers. It finds Python's, NumPy's and torch's
    generators seeded by (seed, epoch, sample), or by the micro-batch's place where samples are handled together.
    """

    def __init__(self, samples: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self._samples = samples
        self._collate = collate_fn or collate
        self._seed = seed
        self._runs_user_code = collate_fn is not None or not _is_plain(samples)
        self._fetch_together = getattr(samples, "__getitems__", None)
        self.counts_samples = collate_fn is not None

    def __len__(self) -> int:
        return len(self._samples)

    def fingerprint(self) -> Facts:
        """What the samples are, as far as it can be told without running code of the user's."""
        return facts_of(self._samples)

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        return self._read(indices, epoch, position)[0]

    def read_counted(self, indices: Indices, epoch: int, position: int, *, is_weighed: bool = False) -> Read:
        batch, samples = self._read(indices, epoch, position)
        return counted(batch, samples, is_weighed=is_weighed)

    def _read(self, indices: Indices, epoch: int, position: int) -> tuple[Any, list[Any]]:
        """The micro-batch, and the samples that it was made of."""
        wanted = indices.tolist()
        if not self._runs_user_code:
            fetched = [self._samples[i] for i in wanted]
            return join(self._collate, fetched, wanted), fetched
        block_seed = derive_seed(self._seed, Purpose.SAMPLE_BLOCK, epoch, position)
        with host_randomness() as randomness:
            if self._fetch_together is not None:
                randomness.seed(block_seed)
                fetched = _fetch(self._fetch_together, wanted, "samples")
                if len(fetched) != len(wanted):
                    raise ValueError(
                        f"__getitems__ of the data set returned {len(fetched)} samples for {len(wanted)} indices: "
                        "return one for each; to leave some out, give a collate_fn that does"
                    )
            else:
                fetched = []
                for i in wanted:
                    randomness.seed(derive_seed(self._seed, Purpose.SAMPLE, epoch, i))
                    fetched.append(_fetch(self._samples.__getitem__, i))
                randomness.seed(block_seed)
            return join(self._collate, fetched, wanted), fetched


class Cycle:
    """Whole batches, or samples used singly, in fixed order, over and over up to `length`; nothing is collated.

    Reading draws random numbers as in `Samples`; every pass over the items counts as an epoch.
    """

    def __init__(self, items: Sequence[Any], length: int, seed: int) -> None:
        self._items = items
        self._length = length
        self._seed = seed
        self._runs_user_code = not _is_plain(items)

    def __len__(self) -> int:
        return self._length

    def fingerprint(self) -> Facts:
        return facts_of(self._items)

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        (index,) = indices.tolist()
        pass_number, item = divmod(index, len(self._items))
        if not self._runs_user_code:
            return self._items[item]
        with host_randomness() as randomness:
            randomness.seed(derive_seed(self._seed, Purpose.SAMPLE, pass_number, item))
            return _fetch(self._items.__getitem__, item)


def as_source(data: Any, *, collate_fn: Callable[[list[Any]], Any] | None = None, seed: int = 0) -> Source:
    """The source for what the user passed as `data`, which has numbered samples."""
    from paceline.data.sources.detect import (
        ready_source,  # not above: the sources it knows are made of parts of this module
    )

    ready = ready_source(data, collate_fn, seed)
    if ready is not None:
        return ready
    if type(data) is TensorDataset and collate_fn is None:  # a subclass may do more than index
        data = tuple(data.tensors)
    if _is_columns(data):
        if collate_fn is not None:
            raise ValueError(
                "collate_fn joins samples, but data is given as whole columns: pass a list of samples or a data set"
            )
        source: Source = Columns(data)
    elif not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise TypeError(
            f"data is a {type(data).__name__}, which has no __getitem__ and __len__: pass a list of samples, "
            "tensors or arrays, or a map-style torch Dataset"
        )
    else:
        source = Samples(data, collate_fn, seed)
    if len(source) == 0:
        raise ValueError("data is empty: there is nothing to train on")
    return source


def collate(samples: list[Any]) -> Any:
    """torch's default collation; pairs come out as `Pair`."""
    batch = default_collate(samples)
    first = samples[0]
    return Pair._make(batch) if type(first) in (list, tuple) and len(first) == 2 else batch


def _fetch(get: Callable[[Any], Any], wanted: int | list[int], what: str = "sample") -> Any:
    try:
        return get(wanted)
    except StopIteration as error:
        raise ended_by_stop_iteration(f"reading {what} {wanted} of the data set") from error
    except BaseException as error:
        error.add_note(f"while reading {what} {wanted} of the data set")
        raise


def _is_plain(samples: Any) -> bool:
    """Whether indexing only looks up: no code of the user's runs, so no random numbers are drawn."""
    return type(samples) in (list, tuple, torch.Tensor, np.ndarray)


def _is_columns(data: Any) -> bool:
    if isinstance(data, torch.Tensor | np.ndarray):
        return True
    if not isinstance(data, tuple | Mapping):
        return False
    parts = list(data.values()) if isinstance(data, Mapping) else data
    are_columns = [isinstance(part, torch.Tensor | np.ndarray) and part.ndim > 0 for part in parts]
    if not all(are_columns) and (any(are_columns) or isinstance(data, Mapping)):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise TypeError(
            f"data is a {type(data).__name__} of {kinds}: columns must all be tensors or arrays with one row per "
            "sample; to give single samples, put them in a list"
        )
    return bool(parts)


def _as_tensor(column: torch.Tensor | npt.NDArray[Any]) -> torch.Tensor:
    if column.ndim == 0:
        raise ValueError("data is a single number: it needs one row per sample")
    if isinstance(column, torch.Tensor):
        return column
    with warnings.catch_warnings():
        # A memory-mapped file may be read-only: rows are copied out of it, nothing is written.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(column)
