"""One small interface over what users keep their samples in: lists, tensors, arrays, map-style datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset, default_collate

from paceline.core.seeding import Purpose, derive_seed, host_randomness

Indices = npt.NDArray[np.int64]


class Pair(NamedTuple):
    """A micro-batch of inputs and targets."""

    x: Any
    y: Any


class Source(Protocol):
    """Samples with numbers. What `read` returns depends on its arguments alone, whoever calls it and when."""

    def __len__(self) -> int: ...

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        """These samples as one micro-batch on the host. `position` is where it starts in the epoch's order."""


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

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        index = torch.from_numpy(indices)
        return self._pack([t.index_select(0, index.to(t.device)) for t in self._tensors])


class Samples:
    """Samples fetched one by one, or together where the data set can (`__getitems__`), then collated.

    A data set or collate function of the user's may draw random numbers. It finds Python's, NumPy's and torch's
    generators seeded by (seed, epoch, sample), or by the micro-batch's place where samples are handled together.
    """

    def __init__(self, samples: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self._samples = samples
        self._collate = collate_fn or collate
        self._seed = seed
        self._runs_user_code = collate_fn is not None or not isinstance(samples, list | tuple)
        self._fetch_together = getattr(samples, "__getitems__", None)

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        wanted = indices.tolist()
        if not self._runs_user_code:
            return self._collate([self._samples[i] for i in wanted])
        with host_randomness() as randomness:
            block_seed = derive_seed(self._seed, Purpose.SAMPLE_BLOCK, epoch, position)
            if self._fetch_together is not None:
                randomness.seed(block_seed)
                return self._collate(self._fetch_together(wanted))
            fetched = []
            for i in wanted:
                randomness.seed(derive_seed(self._seed, Purpose.SAMPLE, epoch, i))
                try:
                    fetched.append(self._samples[i])
                except Exception as error:
                    error.add_note(f"while reading sample {i} of the data set")
                    raise
            randomness.seed(block_seed)
            return self._collate(fetched)


class Cycle:
    """Whole batches, or samples used singly, in fixed order, over and over up to `length`; nothing is collated."""

    def __init__(self, items: Sequence[Any], length: int) -> None:
        self._items = items
        self._length = length

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        (index,) = indices.tolist()
        return self._items[index % len(self._items)]


def as_source(data: Any, *, collate_fn: Callable[[list[Any]], Any] | None = None, seed: int = 0) -> Source:
    """The source for what the user passed as `data`."""
    if isinstance(data, TensorDataset) and collate_fn is None:
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
    return Pair._make(batch) if type(batch) in (list, tuple) and len(batch) == 2 else batch


def _is_columns(data: Any) -> bool:
    if isinstance(data, torch.Tensor | np.ndarray):
        return True
    parts: Sequence[Any] = ()
    if isinstance(data, tuple):
        parts = data
    elif isinstance(data, Mapping):
        parts = list(data.values())
    return len(parts) > 0 and all(isinstance(part, torch.Tensor | np.ndarray) and part.ndim > 0 for part in parts)


def _as_tensor(column: torch.Tensor | npt.NDArray[Any]) -> torch.Tensor:
    if column.ndim == 0:
        raise ValueError("data is a single number: it needs one row per sample")
    return column if isinstance(column, torch.Tensor) else torch.from_numpy(column)
