"""Collation of samples into a micro-batch, and the number of rows of what user code made of them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from paceline.data.errors import UserCode

_MAX_SHOWN = 8  # parts of a batch in an error message
_MAX_DEPTH = 8  # user objects may contain each other
_MAX_PARTS = 64  # a sample with more items is a list of numbers, such as tokens


class Pair(NamedTuple):
    """A micro-batch of inputs and targets."""

    x: Any
    y: Any


class Read(NamedTuple):
    """A micro-batch that was read: the batch (None if no sample is left), its number of samples, and the samples that
    were skipped as bad. `exists`: False beyond the end of a stream."""

    batch: Any
    num_samples: int
    skipped: tuple[Any, ...] = ()
    exists: bool = True


def collate(samples: list[Any]) -> Any:
    """torch's default collation; pairs become a `Pair`."""
    batch = default_collate(samples)
    return as_pair(batch) if type(samples[0]) in (list, tuple) else batch


def as_pair(batch: Any) -> Any:
    """A plain pair as a `Pair`; any other batch unchanged."""
    return Pair._make(batch) if type(batch) in (list, tuple) and len(batch) == 2 else batch


def counted(batch: Any, samples: Sequence[Any], *, is_weighed: bool) -> Read:
    """The result of a user's collate function on these samples. It may leave samples out, even all of them."""
    if batch is not None and (num_rows := len(samples) if is_weighed else count_rows(batch, samples)):
        return Read(batch, num_rows)
    warnings.warn("collate_fn left no sample of a micro-batch: the step continues without it", stacklevel=2)
    return Read(None, 0)


def join(collate_fn: Callable[[list[Any]], Any] | None, samples: list[Any], indices: Sequence[int]) -> Any:
    """The samples as one micro-batch. If torch's collation fails because shapes differ, the error names two samples."""
    with UserCode("joining samples {} of the data set to a micro-batch", indices):
        if collate_fn is not None:
            return collate_fn(samples)  # its errors are its own: it may pad samples of different shapes
        try:
            return collate(samples)
        except Exception as error:
            if (problem := _problem(samples, indices)) is None:
                raise
            raise ValueError(problem) from error


def _problem(samples: Sequence[Any], indices: Sequence[int]) -> str | None:
    for index, sample in zip(indices, samples, strict=True):
        if sample is None:
            return (
                f"sample {index} of the data set is None, which cannot be joined to a micro-batch: return a sample, "
                "give a collate_fn that leaves None out, or raise an error in the data set and set "
                "skip_bad_samples=True"
            )
    mismatch = _mismatch(samples, indices)
    return mismatch and f"{mismatch}: make all samples the same shape, or give a collate_fn that pads them"


def _mismatch(samples: Sequence[Any], indices: Sequence[int], where: str = "") -> str | None:
    """The first place inside nested samples where shapes differ."""
    first = samples[0]
    is_sequence = isinstance(first, Sequence) and not isinstance(first, str | bytes)
    if isinstance(first, torch.Tensor | np.ndarray) or is_sequence:
        shapes = [_shape(sample) for sample in samples]
        for index, shape in zip(indices, shapes, strict=True):
            if shape != shapes[0]:
                return (
                    f"samples {indices[0]} and {index} do not fit into one micro-batch: their shapes{where} are "
                    f"{shapes[0]} and {shape}"
                )
    parts: list[tuple[str, list[Any]]] = []
    if isinstance(first, Mapping):
        keys = [key for key in first if all(isinstance(s, Mapping) and key in s for s in samples)]
        parts = [(f" of {key!r}", [sample[key] for sample in samples]) for key in keys]
    elif isinstance(first, list | tuple):
        parts = [(f" of item {i}", [sample[i] for sample in samples]) for i in range(len(first))]
    found = (_mismatch(values, indices, f"{name}{where}") for name, values in parts)
    return next(filter(None, found), None)


def _shape(sample: Any) -> tuple[int, ...]:
    if isinstance(sample, torch.Tensor | np.ndarray):
        return tuple(sample.shape)
    return (len(sample),) if isinstance(sample, Sequence) else ()


class _Part(NamedTuple):
    """A part of a batch that has rows.

    `sizes`: its number of rows. A list whose items have the same number of rows has two: each item may itself be a row.
    `num_columns`: the second dimension of a tensor or array, if it has one.
    """

    where: str
    shown: str
    sizes: frozenset[int]
    num_columns: int | None = None


def count_rows(batch: Any, samples: Sequence[Any] | None = None) -> int:
    """The rows of a batch, on which its tensors, arrays and lists must agree; otherwise an error asks for weight_fn.

    By default a loss is a mean over them. A collate function may leave samples out or repeat some, so the number of
    samples that it got is not enough.

    `samples`: what the batch was made of, if known. If some parts have a row for each of them, no sample was left out,
    and the others may have one row for all, or several for each (tokens, nodes, offsets). If all parts have a column
    for each of them instead, it may be a batch of (time, samples), and is refused.
    """
    parts = list(_parts(batch, "", _identities(samples)))
    sizes, asked = _sizes(parts), 0 if samples is None else len(samples)
    if asked in sizes and all(size == 1 or size >= asked for size in sizes):
        return asked
    if len(sizes) == 1 and not (asked > 1 and all(part.num_columns == asked for part in parts)):
        (size,) = sizes
        is_list_of_samples = type(batch) in (list, tuple) and 1 < len(batch) == asked and _is_of_one_kind(batch)
        if not is_list_of_samples:
            return size
        if size > asked:  # each sample has rows
            return asked
    raise TypeError(
        f"{_rows_problem(batch, parts, asked)}: set weight_fn, which maps a batch to the number that its loss is a "
        "mean over"
    )


def _sizes(parts: Sequence[_Part]) -> frozenset[int]:
    """The different numbers of rows. Of a part with two, the one that matches another part counts, else both do."""
    sizes = frozenset[int]().union(*(part.sizes for part in parts if len(part.sizes) == 1))
    for part in parts:
        if not part.sizes & sizes:
            sizes |= part.sizes
    return sizes


def _parts(value: Any, where: str, samples: frozenset[int], depth: int = 0) -> Iterator[_Part]:
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim:
            num_columns = value.shape[1] if value.ndim > 1 else None
            yield _Part(where, f"shape {tuple(value.shape)}", frozenset([len(value)]), num_columns)
    elif isinstance(value, PackedSequence):
        yield _Part(where, "a PackedSequence", frozenset([int(value.batch_sizes[0])]))
    elif type(value) in (list, tuple):
        yield from _sequence_parts(value, where, samples, depth + 1)
    elif depth < _MAX_DEPTH:
        for name, item in _items(value):
            yield from _parts(item, f"{where}{name}", samples, depth + 1)


def _items(value: Any) -> list[tuple[str, Any]]:
    """The items of a dict, a named tuple, a data class, or a user object."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if callable(value):
        return []
    if dataclasses.is_dataclass(value):
        names: Sequence[str] = [field.name for field in dataclasses.fields(value)]
    else:
        names = getattr(value, "_fields" if isinstance(value, tuple) else "__dict__", ())
    return [(f".{name}", getattr(value, name)) for name in names]


def _sequence_parts(
    value: list[Any] | tuple[Any, ...], where: str, samples: frozenset[int], depth: int
) -> Iterator[_Part]:
    """A list either consists of rows, or holds parts that have rows, as a pair of inputs and targets does."""
    if id(value) in samples:
        samples = frozenset()  # a sample itself: its parts are not rows
    as_rows = _Part(where, f"{type(value).__name__} of {len(value)}", frozenset([len(value)]))
    if any(id(item) in samples for item in value):
        yield as_rows  # the samples were only put into a list
        return
    is_plain = bool(value) and isinstance(value[0], str | bytes | int | float)  # as all are: do not check each
    items = () if is_plain else enumerate(value)
    parts = [part for i, item in items for part in _parts(item, f"{where}[{i}]", samples, depth)]
    if not parts:
        # Plain values: a list of texts or labels. A tuple of numbers may be a size.
        if value and (isinstance(value, list) or all(isinstance(item, str) for item in value)):
            yield as_rows
    elif not where or not _is_of_one_kind(value):  # a batch that is a list holds parts
        yield from parts
    elif len(sizes := _sizes(parts)) > 1:
        yield as_rows  # such as sequences without padding
    else:
        shown = f"{as_rows.shown} with {next(iter(sizes))} rows each"
        yield _Part(where, shown, sizes | as_rows.sizes)


def _identities(samples: Sequence[Any] | None) -> frozenset[int]:
    """The ids of the samples and of their parts, except plain values: an equal text or number may be unrelated."""
    found: list[Any] = []
    for sample in samples or ():
        found.append(sample)
        if isinstance(sample, Mapping):
            found += sample.values()
        elif isinstance(sample, list | tuple) and len(sample) <= _MAX_PARTS:
            found += sample
    return frozenset(id(item) for item in found if not isinstance(item, str | bytes | Number | None))


def _is_of_one_kind(items: Sequence[Any]) -> bool:
    def kind(item: Any) -> Any:
        return (type(item), item.dtype, item.ndim) if isinstance(item, torch.Tensor | np.ndarray) else type(item)

    return len(set(map(kind, items))) == 1


def _rows_problem(batch: Any, parts: Sequence[_Part], asked: int) -> str:
    if not parts:
        return f"cannot count the samples of a batch: it is a {type(batch).__name__} without rows"
    shown = ", ".join(f"batch{part.where}: {part.shown}" for part in parts[:_MAX_SHOWN])
    more = f" and {len(parts) - _MAX_SHOWN} more" if len(parts) > _MAX_SHOWN else ""
    made = f" that collate_fn made of {asked} samples" if asked else ""
    if len(_sizes(parts)) == 1:
        return f"cannot tell whether the rows of a batch{made} are its samples ({shown}{more})"
    return f"the parts of a batch{made} differ in their number of rows ({shown}{more})"
