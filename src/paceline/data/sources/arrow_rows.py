"""Rows of record batches, in any order: as tensors if they are numbers, else as Python values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.imports import pyarrow
from paceline.data.errors import SampleError, check_range
from paceline.data.sources.base import Indices

# Torch implements hardly any operation on the wider unsigned types: ids and labels become int64.
_WIDENED = {"uint16": torch.int64, "uint32": torch.int64}

# Columns by name, each (rows, ...).
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


class _NotRectangular(Exception):
    """Numbers that do not form an array: there are nulls, or lists of different lengths."""


class RecordBatches:
    """Numbered record batches; `starts[number]` is the first row of one, `starts[-1]` the number of rows.

    Args:
        num_rows: of each record batch.
        batches: the record batches, if they are in memory.
    """

    def __init__(self, num_rows: Sequence[int], batches: Sequence[Any] = ()) -> None:
        self.starts: Indices = np.cumsum([0, *num_rows])
        self._batches = batches
        self._arrays: dict[int, Arrays | None] = {}

    def batch(self, number: int) -> Any:
        return self._batches[number]

    def is_permanent(self, number: int) -> bool:
        """Whether the memory of a record batch stays valid, so that views of it may be kept."""
        return True

    def file_of(self, row: int) -> str | None:
        """The path of the file that holds a row, if it is known."""
        return None

    def arrays(self, number: int) -> Arrays | None:
        """A record batch's columns as views of its memory, or None if they are not all arrays of numbers."""
        if number not in self._arrays:
            batch = self.batch(number)
            self._arrays[number] = _views(batch) if self.is_permanent(number) else None
        return self._arrays[number]

    def read_columns(self, rows: Indices, samples: Indices) -> dict[str, Any]:
        """Rows by column: a tensor (rows, ...) for numbers and lists of them, else a list of Python values.

        `samples`: the numbers of the rows in error messages.
        """
        columns = self._copy_views(rows)
        if columns is not None:
            return columns
        columns = {}
        for name, array in self._gather(rows):
            try:
                columns[name] = _tensor(array) if _is_numeric(array.type) else array.to_pylist()
            except _NotRectangular:
                raise self._explanation(name, array, samples) from None
        return columns

    def read_rows(self, rows: Indices) -> list[dict[str, Any]]:
        """Each row as a dict: numbers and lists of them as tensors, other values as Python values, null as None."""
        columns = {name: _row_values(array) for name, array in self._gather(rows)}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def _copy_views(self, indices: Indices) -> dict[str, Any] | None:
        """Rows copied from `arrays`, or None if they are not all numbers of one shape.

        In random order this takes a fraction of the time that a table takes.
        """
        pieces = [(self.arrays(number), row, length) for number, row, length in self._pieces(indices)]
        if not pieces or pieces[0][0] is None:
            return None
        columns = {}
        for name, first in pieces[0][0].items():
            columns[name] = _empty(len(indices), first)
            rows, place = columns[name].numpy(), 0
            for arrays, row, length in pieces:
                if arrays is None or arrays[name].shape[1:] != first.shape[1:]:
                    return None
                rows[place : place + length] = arrays[name][row : row + length]
                place += length
        return columns

    def _gather(self, indices: Indices) -> Iterator[tuple[str, Any]]:
        """The columns of these rows, in this order, each as one Arrow array."""
        pieces = [self.batch(number).slice(row, length) for number, row, length in self._pieces(indices)]
        table = pyarrow().Table.from_batches(pieces).combine_chunks()
        for name, column in zip(table.column_names, table.columns, strict=True):
            array = column.chunk(0)
            is_dictionary = pyarrow("pyarrow.types").is_dictionary(array.type)
            yield name, array.dictionary_decode() if is_dictionary else array

    def _pieces(self, indices: Indices) -> Iterator[tuple[int, int, int]]:
        """Runs of neighbouring rows: record batch, first row in it, number of rows."""
        check_range(indices, int(self.starts[-1]))
        numbers = np.searchsorted(self.starts, indices, side="right") - 1
        rows = indices - self.starts[numbers]
        begins_piece = np.ones(len(indices), bool)
        begins_piece[1:] = (rows[1:] != rows[:-1] + 1) | (numbers[1:] != numbers[:-1])
        firsts = np.flatnonzero(begins_piece)
        lengths = np.append(firsts[1:], len(indices)) - firsts
        return zip(numbers[firsts].tolist(), rows[firsts].tolist(), lengths.tolist(), strict=True)

    def _explanation(self, name: str, array: Any, samples: Indices) -> Exception:
        """Why a column of numbers is not a tensor: a null or uneven lists in a row, or two rows of different shapes."""
        shapes = []
        for place, index in enumerate(samples.tolist()):
            try:
                shapes.append(_numbers(array.slice(place, 1)).shape[1:])
            except _NotRectangular:
                file = self.file_of(index)
                return SampleError(
                    f"sample {index}{f' in {file}' if file else ''} has a null or lists of unequal lengths in column "
                    f"{name!r}, which cannot become a tensor: fill it in a transform or collate_fn, or leave the "
                    "column out (columns=...)",
                    index=index,
                    file=file,
                )
        other = next(place for place, shape in enumerate(shapes) if shape != shapes[0])
        return ValueError(
            f"samples {samples[0]} and {samples[other]} do not fit into one micro-batch: their shapes of column "
            f"{name!r} are {shapes[0]} and {shapes[other]}: give a collate_fn that pads them, or a transform that cuts "
            "them"
        )


def _views(batch: Any) -> Arrays | None:
    try:
        columns = zip(batch.schema.names, batch.columns, strict=True)
        return {name: _numbers(column, copy=False) for name, column in columns}
    except (_NotRectangular, pyarrow().ArrowInvalid):  # nulls, lists of different lengths; booleans, stored as bits
        return None


def _is_list(type: Any) -> bool:
    types = pyarrow("pyarrow.types")
    return bool(types.is_list(type) or types.is_large_list(type) or types.is_fixed_size_list(type))


def _is_numeric(type: Any) -> bool:
    """Whether a type is one of numbers or nested lists of them."""
    types, type = pyarrow("pyarrow.types"), getattr(type, "storage_type", type)
    if _is_list(type):
        return _is_numeric(type.value_type)
    return bool(types.is_integer(type) or types.is_floating(type) or types.is_boolean(type))


def _numbers(array: Any, *, copy: bool = True) -> npt.NDArray[Any]:
    """(rows, ...), without a copy if possible. If `copy` is False and one is needed, pyarrow raises ArrowInvalid."""
    array = getattr(array, "storage", array)
    if array.null_count or not _is_numeric(array.type):
        raise _NotRectangular
    if not _is_list(array.type):
        numbers: npt.NDArray[Any] = array.to_numpy(zero_copy_only=not copy)
        return numbers
    if pyarrow("pyarrow.types").is_fixed_size_list(array.type):
        lengths = np.array([array.type.list_size])
    else:
        lengths = np.unique(np.diff(array.offsets.to_numpy()))
    if len(lengths) > 1:
        raise _NotRectangular
    inner = _numbers(array.flatten(), copy=copy)
    return inner.reshape(len(array), lengths[0] if len(lengths) else 0, *inner.shape[1:])


def _empty(num_rows: int, like: npt.NDArray[Any]) -> torch.Tensor:
    """A new tensor for rows of an array: writable, and aligned as torch aligns it."""
    dtype = _WIDENED.get(like.dtype.name) or getattr(torch, like.dtype.name)
    return torch.empty((num_rows, *like.shape[1:]), dtype=dtype)


def _tensor(array: Any) -> torch.Tensor:
    numbers = _numbers(array)
    tensor = _empty(len(numbers), numbers)
    tensor.numpy()[...] = numbers
    return tensor


def _row_values(array: Any) -> list[Any]:
    """The value of each row: a tensor if it is an array of numbers."""
    if not _is_numeric(array.type):
        return list(array.to_pylist())
    try:
        return list(_tensor(array).unbind())
    except _NotRectangular:
        if len(array) == 1:
            return [array[0].as_py()]
        return [_row_values(array.slice(i, 1))[0] for i in range(len(array))]
