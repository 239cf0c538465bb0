"""The number of rows of a batch that user code made: by default, its loss is a mean over them.

A collate function may leave samples out or repeat some, so the number of samples that it got is not enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

_MAX_SHOWN = 8  # parts of a batch in an error message
_MAX_DEPTH = 8  # user objects may contain each other
_MAX_PARTS = 64  # a sample with more items is a list of numbers, such as tokens


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
        f"{_problem(batch, parts, asked)}: set weight_fn, which maps a batch to the number that its loss is a mean over"
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
        yield from _parts_of_sequence(value, where, samples, depth + 1)
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


def _parts_of_sequence(
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


def _problem(batch: Any, parts: Sequence[_Part], asked: int) -> str:
    if not parts:
        return f"cannot count the samples of a batch: it is a {type(batch).__name__} without rows"
    shown = ", ".join(f"batch{part.where}: {part.shown}" for part in parts[:_MAX_SHOWN])
    more = f" and {len(parts) - _MAX_SHOWN} more" if len(parts) > _MAX_SHOWN else ""
    made = f" that collate_fn made of {asked} samples" if asked else ""
    if len(_sizes(parts)) == 1:
        return f"cannot tell whether the rows of a batch{made} are its samples ({shown}{more})"
    return f"the parts of a batch{made} differ in their number of rows ({shown}{more})"
