"""Record batches of many files, by number: opened when first asked for, decoded ones kept within bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np

from paceline.core.optional import pyarrow
from paceline.data.errors import SampleError
from paceline.data.sources.arrow_index import DataFile, fingerprint, one_line
from paceline.data.sources.arrow_rows import Arrays, numbers_in_place
from paceline.data.sources.base import Indices


class FileBatches:
    """The record batches of all files, numbered in order; `starts[number]` is the first row of one, and `starts[-1]`
    the number of rows.

    Batches that lie in a memory-mapped file as they are cost no memory and stay. Those that had to be decoded (from
    Parquet or compressed Arrow) are kept up to `max_decoded_bytes`, the last used ones. Pickling takes the index alone.
    """

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str], max_decoded_bytes: int) -> None:
        self.files = files
        self._columns = columns
        self._max_decoded_bytes = max_decoded_bytes
        self._first_numbers = np.cumsum([0, *(len(file.batch_rows) for file in files)])
        self.starts: Indices = np.cumsum([0, *(rows for file in files for rows in file.batch_rows)])
        self._mapped: dict[int, Any] = {}
        self._decoded: OrderedDict[int, Any] = OrderedDict()
        self._decoded_bytes = 0
        self._arrays: dict[int, Arrays | None] = {}
        self._readers: dict[str, tuple[Any, Any]] = {}
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return FileBatches, (self.files, self._columns, self._max_decoded_bytes)

    def file_of(self, row: int) -> str:
        """The path of the file that holds a row."""
        return self._file_number(int(np.searchsorted(self.starts, row, side="right")) - 1)[0].path

    def batch(self, number: int) -> Any:
        """A record batch of the chosen columns."""
        batch = self._mapped.get(number)
        if batch is not None:
            return batch
        with self._lock:
            if number in self._decoded:
                self._decoded.move_to_end(number)
                return self._decoded[number]
            return self._load(number)

    def arrays(self, number: int) -> Arrays | None:
        """A record batch's columns where they lie in the file; None where they are no arrays of numbers."""
        if number not in self._arrays:
            batch = self.batch(number)
            # Views of a decoded batch would keep its memory beyond what is allowed.
            self._arrays[number] = numbers_in_place(batch) if number in self._mapped else None
        return self._arrays[number]

    def _file_number(self, number: int) -> tuple[DataFile, int]:
        """The file a batch is in, and its number there."""
        file = int(np.searchsorted(self._first_numbers, number, side="right")) - 1
        return self.files[file], number - int(self._first_numbers[file])

    def _load(self, number: int) -> Any:
        """Reads a batch, and with it others of its file where they cannot be read alone."""
        file, local = self._file_number(number)
        try:
            for i, batch, is_mapped in self._read(file, local):
                if is_mapped:
                    self._mapped[number + i - local] = batch
                else:
                    self._keep_decoded(number + i - local, batch)
                if i == local and not is_mapped:  # what follows would cost decoding
                    return batch
        except (pyarrow().ArrowException, OSError) as error:
            raise SampleError(
                f"{file.path} cannot be read: {one_line(error)}: write it again", file=file.path
            ) from error
        return self._mapped[number]

    def _read(self, file: DataFile, local: int) -> Iterable[tuple[int, Any, bool]]:
        """(number in the file, batch, whether it lies in the file as it is)."""
        if file.format == "parquet":
            yield local, self._row_group(file, local), False
        elif file.format == "file":
            mapping, reader = self._reader(file)
            yield self._chosen(local, reader.get_batch(local), mapping)
        else:
            mapping = _map(file)
            for i, batch in enumerate(pyarrow().ipc.open_stream(mapping)):
                yield self._chosen(i, batch, mapping)

    def _reader(self, file: DataFile) -> tuple[Any, Any]:
        """A mapped file, and what finds single batches in it."""
        if file.path not in self._readers:
            mapping = _map(file)
            self._readers[file.path] = mapping, pyarrow().ipc.open_file(mapping)
        return self._readers[file.path]

    def _chosen(self, local: int, batch: Any, mapping: Any) -> tuple[int, Any, bool]:
        batch.validate()
        arrays = [batch.column(name) for name in self._columns]
        end = mapping.address + mapping.size
        buffers = (buffer for array in arrays for buffer in array.buffers() if buffer is not None and buffer.size)
        is_mapped = all(mapping.address <= buffer.address < end for buffer in buffers)
        # Made anew: what differs from file to file beside the types, such as metadata, is left behind.
        return local, pyarrow().RecordBatch.from_arrays(arrays, names=list(self._columns)), is_mapped

    def _row_group(self, file: DataFile, local: int) -> Any:
        _check_unchanged(file)
        with pyarrow("pyarrow.parquet").ParquetFile(file.path, memory_map=True) as parquet:
            # No threads: workers and reader processes are parallel already.
            table = parquet.read_row_group(local, columns=list(self._columns), use_threads=False)
        arrays = [table.column(name).combine_chunks() for name in self._columns]
        return pyarrow().RecordBatch.from_arrays(arrays, names=list(self._columns))

    def _keep_decoded(self, number: int, batch: Any) -> None:
        """Last used last; the oldest go as long as there is too much."""
        if number in self._decoded:
            return
        self._decoded[number] = batch
        self._decoded_bytes += batch.nbytes
        while self._decoded_bytes > self._max_decoded_bytes:
            _, oldest = self._decoded.popitem(last=False)
            self._decoded_bytes -= oldest.nbytes


class TableBatches:
    """The record batches of a table that is open already."""

    def __init__(self, table: Any) -> None:
        self._batches = table.to_batches()
        self._arrays: dict[int, Arrays | None] = {}
        self.starts: Indices = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def file_of(self, row: int) -> None:
        return None

    def batch(self, number: int) -> Any:
        return self._batches[number]

    def arrays(self, number: int) -> Arrays | None:
        if number not in self._arrays:
            self._arrays[number] = numbers_in_place(self._batches[number])
        return self._arrays[number]


def _check_unchanged(file: DataFile) -> None:
    """By content alone: a copy on another machine may have another time."""
    if fingerprint(file.path)[1] != file.content:
        raise SampleError(f"{file.path} has changed since the run began: restore it, or start again", file=file.path)


def _map(file: DataFile) -> Any:
    """A file's bytes. The mapping lives as long as anything that points into it; the file is closed at once."""
    _check_unchanged(file)
    with pyarrow().memory_map(file.path) as mapped:
        return mapped.read_buffer()
