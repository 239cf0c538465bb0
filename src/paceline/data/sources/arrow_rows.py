"""Rows out of record batches: gathered in any order, as tensors where they are numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.optional import pyarrow
from paceline.data.errors import SampleError, check_range
from paceline.data.sources.base import Indices

# Torch has the wider unsigned types, and hardly any operation on them: ids and labels come as int64.
_TORCH_DTYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "uint16": torch.int64,
    "int32": torch.int32,
    "uint32": torch.int64,
    "int64": torch.int64,
    "uint64": torch.uint64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


# Columns by name, each (rows, ...).
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


class Batches(Protocol):
    """Numbered record batches; `starts[number]` is the first row of one, `starts[-1]` the number of rows."""

    starts: Indices

    def batch(self, number: int) -> Any: ...

    def arrays(self, number: int) -> Arrays | None:
        """A record batch's columns where they lie; None where they are no arrays of numbers, or had to be decoded."""

    def file_of(self, row: int) -> str | None: ...


class _NotRectangular(Exception):
    """Numbers that make no array: something is null, or lists differ in length."""


def read_columns(batches: Batches, rows: Indices, samples: Indices) -> dict[str, Any]:
    """Rows by column: a tensor (rows, ...) for numbers and lists of them, else a list of Python values.

    `samples` are the numbers that errors name them by.
    """
    columns = _copy_in_place(batches, rows)
    return _as_columns(gather(batches, rows), samples, batches) if columns is None else columns


def _copy_in_place(batches: Batches, indices: Indices) -> dict[str, Any] | None:
    """The rows out of the memory they lie in, without a table between; None unless they are all numbers of one shape.

    In random order building a table costs more than anything else.
    """
    pieces = [(batches.arrays(number), row, length) for number, row, length in _pieces(batches.starts, indices)]
    if not pieces or pieces[0][0] is None:
        return None
    columns = {}
    for name, first in pieces[0][0].items():
        shape = first.shape[1:]
        tensor = torch.empty((len(indices), *shape), dtype=_TORCH_DTYPES[first.dtype.name])
        rows, place = tensor.numpy(), 0
        for arrays, row, length in pieces:
            if arrays is None or arrays[name].shape[1:] != shape:
                return None
            rows[place : place + length] = arrays[name][row : row + length]
            place += length
        columns[name] = tensor
    return columns


def numbers_in_place(batch: Any) -> Arrays | None:
    """A record batch's columns as views of its memory; None unless all are numbers, or lists of one length of them."""
    arrays = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if not _is_numeric(column.type):
            return None
        try:
            arrays[name] = _numbers(column, copy=False)
        except (_NotRectangular, pyarrow().ArrowInvalid):  # nulls, unequal lengths; booleans, which are bits
            return None
    return arrays


def gather(batches: Batches, indices: Indices) -> Any:
    """The rows with these numbers, in this order, as a table of one chunk."""
    pieces = [batches.batch(number).slice(row, length) for number, row, length in _pieces(batches.starts, indices)]
    return pyarrow().Table.from_batches(pieces).combine_chunks()


def _pieces(starts: Indices, indices: Indices) -> Iterator[tuple[int, int, int]]:
    """Where rows lie, neighbours together: record batch, first row in it, number of rows."""
    check_range(indices, int(starts[-1]))
    numbers = np.searchsorted(starts, indices, side="right") - 1
    rows = indices - starts[numbers]
    begins_piece = np.ones(len(indices), bool)
    begins_piece[1:] = (rows[1:] != rows[:-1] + 1) | (numbers[1:] != numbers[:-1])
    firsts = np.flatnonzero(begins_piece)
    lengths = np.append(firsts[1:], len(indices)) - firsts
    return zip(numbers[firsts].tolist(), rows[firsts].tolist(), lengths.tolist(), strict=True)


def _as_columns(table: Any, indices: Indices, batches: Batches) -> dict[str, Any]:
    columns = {}
    for name, array in _arrays(table):
        if not _is_numeric(array.type):
            columns[name] = array.to_pylist()
            continue
        try:
            columns[name] = _tensor(array)
        except _NotRectangular:
            raise _explanation(name, array, indices, batches) from None
    return columns


def as_rows(table: Any) -> list[dict[str, Any]]:
    """Each row by itself: numbers and lists of them are tensors, everything else Python values; null is None."""
    columns = {name: _row_values(array) for name, array in _arrays(table)}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _arrays(table: Any) -> list[tuple[str, Any]]:
    types = pyarrow("pyarrow.types")
    arrays = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        array = column.chunk(0)
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        arrays.append((name, array))
    return arrays


def _is_list(type: Any) -> bool:
    types = pyarrow("pyarrow.types")
    return bool(types.is_list(type) or types.is_large_list(type) or types.is_fixed_size_list(type))


def _storage_type(type: Any) -> Any:
    return getattr(type, "storage_type", type)


def _is_numeric(type: Any) -> bool:
    types = pyarrow("pyarrow.types")
    type = _storage_type(type)
    while _is_list(type):
        type = _storage_type(type.value_type)
    return bool(types.is_integer(type) or types.is_floating(type) or types.is_boolean(type))


def _numbers(array: Any, *, copy: bool = True) -> npt.NDArray[Any]:
    """(rows, ...), in place where they can stay; else a copy, or pyarrow's error."""
    array = getattr(array, "storage", array)
    if array.null_count:
        raise _NotRectangular
    if not _is_list(array.type):
        numbers: npt.NDArray[Any] = array.to_numpy(zero_copy_only=not copy)
        return numbers
    inner = _numbers(array.flatten(), copy=copy)
    return inner.reshape(len(array), _list_length(array), *inner.shape[1:])


def _list_length(array: Any) -> int:
    """The length that all lists have."""
    if pyarrow("pyarrow.types").is_fixed_size_list(array.type):
        return int(array.type.list_size)
    lengths = np.diff(array.offsets.to_numpy())
    if not len(lengths):
        return 0
    if (lengths != lengths[0]).any():
        raise _NotRectangular
    return int(lengths[0])


def _tensor(array: Any) -> torch.Tensor:
    """A tensor with memory of its own: writable, and aligned as torch aligns it."""
    numbers = _numbers(array)
    tensor = torch.empty(numbers.shape, dtype=_TORCH_DTYPES[numbers.dtype.name])
    tensor.numpy()[...] = numbers
    return tensor


def _row_values(array: Any) -> list[Any]:
    if not _is_numeric(array.type):
        values: list[Any] = array.to_pylist()
        return values
    try:
        return list(_tensor(array).unbind())
    except _NotRectangular:
        return [_row_value(array.slice(i, 1)) for i in range(len(array))]


def _row_value(row: Any) -> Any:
    try:
        return _tensor(row)[0]
    except _NotRectangular:
        return row[0].as_py()


def _explanation(name: str, array: Any, indices: Indices, batches: Batches) -> Exception:
    """Why a column of numbers makes no tensor: a row that has none by itself, or two of unequal shapes."""
    shapes = []
    for place, index in enumerate(indices.tolist()):
        try:
            shapes.append(_numbers(array.slice(place, 1)).shape[1:])
        except _NotRectangular:
            file = batches.file_of(index)
            in_file = "" if file is None else f" in {file}"
            return SampleError(
                f"sample {index}{in_file} has a null or lists of unequal lengths in column {name!r}, which makes no "
                "tensor: fill it in a transform or collate_fn, or leave the column out (columns=...)",
                index=index,
                file=file,
            )
    other = next(place for place, shape in enumerate(shapes) if shape != shapes[0])
    return ValueError(
        f"samples {indices[0]} and {indices[other]} do not fit into one micro-batch: their shapes of column {name!r} "
        f"are {shapes[0]} and {shapes[other]}: give a collate_fn that pads them, or a transform that cuts them"
    )
