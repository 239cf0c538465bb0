"""Arrow and Parquet files: an index of their rows and columns, and their record batches by number.

The index is one JSON file per folder of data. An entry is valid while its file's size, modification time, first and
last 4 KiB stay the same, so a second start reads only these bytes.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any
from zlib import crc32

import numpy as np

from paceline.core.imports import pyarrow
from paceline.data.errors import SampleError
from paceline.data.sources.arrow_rows import RecordBatches

_VERSION = 1
_CHECKED_BYTES = 4096
# The end of an Arrow stream. Without it, record batches may be missing.
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class DataFile:
    """A file's format (file, stream or parquet), the rows of each record batch, and its columns' types by name.

    Row groups of Parquet count as record batches. `mtime_ns` and `content` identify the file's contents.
    """

    path: str
    mtime_ns: int
    content: str
    format: str
    batch_rows: Sequence[int]
    columns: dict[str, str]


def index_files(paths: Sequence[str]) -> list[DataFile]:
    """An entry for each file, from the index if it is still valid."""
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])  # noqa: PTH120 - thousands of strings
    cache = Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline")
    index_path = cache / "arrow" / f"{blake2b(folder.encode(), digest_size=16).hexdigest()}.json"
    known = _load_index(index_path)
    entries = {}
    for path in paths:
        mtime_ns, content = _identify(path)
        entry = known.get(path)
        if entry is None or (entry.mtime_ns, entry.content) != (mtime_ns, content):
            entry = _scan(path, mtime_ns, content)
        entries[path] = entry
    if any(entries[path] is not known.get(path) for path in paths):
        others = {path: entry for path, entry in known.items() if Path(path).exists()}
        _save_index(index_path, others | entries)
    return [entries[path] for path in paths]


def _identify(path: str) -> tuple[int, str]:
    """A file's modification time, and its size with a checksum of its first and last bytes.

    The checksum detects changes that size and time do not show. It does not protect against attacks.
    """
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - one of thousands
            status = os.fstat(file.fileno())
            head = os.pread(file.fileno(), _CHECKED_BYTES, 0)
            tail = os.pread(file.fileno(), _CHECKED_BYTES, max(0, status.st_size - _CHECKED_BYTES))
    except OSError as error:
        raise type(error)(f"cannot open data file {path}: {error.strerror}") from error
    return status.st_mtime_ns, f"{status.st_size}-{crc32(tail, crc32(head)):08x}"


def _load_index(index_path: Path) -> dict[str, DataFile]:
    """The entries of an index; none if there is no index or it is unreadable."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        index = json.loads(index_path.read_bytes())
        if index["version"] == _VERSION:
            return {entry["path"]: DataFile(**entry) for entry in index["files"]}
    return {}


def _save_index(index_path: Path, entries: dict[str, DataFile]) -> None:
    """Best effort. Written to a temporary file and renamed: other processes see the old index or the new one."""
    text = json.dumps({"version": _VERSION, "files": [asdict(entry) for entry in entries.values()]})
    temporary = index_path.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        try:
            index_path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text)
            temporary.replace(index_path)
        except OSError:
            temporary.unlink(missing_ok=True)


def _scan(path: str, mtime_ns: int, content: str) -> DataFile:
    with Path(path).open("rb") as file:
        magic = file.read(6)
    format = "file" if magic == b"ARROW1" else "parquet" if magic[:4] == b"PAR1" else "stream"
    try:
        schema, batch_rows = _scan_parquet(path) if format == "parquet" else _scan_arrow(path, format)
    except (pyarrow().ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is corrupt or truncated, or neither an Arrow nor a Parquet file: {_one_line(error)}: write it "
            "again"
        ) from error
    if not schema.names or len(set(schema.names)) < len(schema.names):
        raise ValueError(f"{path} has the columns {schema.names}: it needs at least one, and each name only once")
    return DataFile(path, mtime_ns, content, format, batch_rows, {field.name: str(field.type) for field in schema})


def _scan_arrow(path: str, format: str) -> tuple[Any, list[int]]:
    pa = pyarrow()
    # One column is enough to count rows; the others need not be decompressed.
    options = pa.ipc.IpcReadOptions(included_fields=[0])
    with pa.memory_map(path) as file:
        if format == "file":
            reader = pa.ipc.open_file(file, options=options)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            return pa.ipc.open_file(file).schema, [batch.num_rows for batch in batches]
        schema = pa.ipc.open_stream(file).schema
        file.seek(0)
        batch_rows = [batch.num_rows for batch in pa.ipc.open_stream(file, options=options)]
        file.seek(max(0, file.size() - len(_END_OF_STREAM)))
        if file.read() != _END_OF_STREAM:
            raise pa.ArrowInvalid("the end-of-stream marker is missing")
    return schema, batch_rows


def _scan_parquet(path: str) -> tuple[Any, list[int]]:
    with pyarrow("pyarrow.parquet").ParquetFile(path) as file:
        metadata = file.metadata
        return file.schema_arrow, [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def _one_line(error: Exception) -> str:
    """The message of a pyarrow error, some of which span several lines."""
    return " ".join(str(error).split())


class FileBatches(RecordBatches):
    """The record batches of files, numbered in order.

    Batches that can be used where they are in a memory-mapped file are kept and cost no memory. Batches that have to be
    decoded (Parquet or compressed Arrow) are kept up to `max_decoded_bytes`, the last used ones. Pickling stores the
    index alone.
    """

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str], max_decoded_bytes: int) -> None:
        super().__init__([rows for file in files for rows in file.batch_rows])
        self.files = files
        self._columns = list(columns)
        self._max_decoded_bytes = max_decoded_bytes
        self._first_numbers = np.cumsum([0, *(len(file.batch_rows) for file in files)])
        self._mapped: dict[int, Any] = {}
        self._decoded: OrderedDict[int, Any] = OrderedDict()
        self._decoded_bytes = 0
        self._readers: dict[str, tuple[Any, Any]] = {}
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return FileBatches, (self.files, self._columns, self._max_decoded_bytes)

    def file_of(self, row: int) -> str:
        return self._locate(int(np.searchsorted(self.starts, row, side="right")) - 1)[0].path

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

    def is_permanent(self, number: int) -> bool:
        return number in self._mapped  # views of a decoded batch would keep its memory beyond the limit

    def _locate(self, number: int) -> tuple[DataFile, int]:
        """The file of a record batch, and its number there."""
        file = int(np.searchsorted(self._first_numbers, number, side="right")) - 1
        return self.files[file], number - int(self._first_numbers[file])

    def _load(self, number: int) -> Any:
        """Read a record batch, and others of its file if it cannot be read alone."""
        file, local = self._locate(number)
        try:
            for i, batch, is_mapped in self._read(file, local):
                if is_mapped:
                    self._mapped[number + i - local] = batch
                    continue
                self._keep_decoded(number + i - local, batch)
                if i == local:  # the batches that follow would have to be decoded
                    return batch
        except (pyarrow().ArrowException, OSError) as error:
            raise SampleError(
                f"{file.path} cannot be read: {_one_line(error)}: write it again", file=file.path
            ) from error
        return self._mapped[number]

    def _read(self, file: DataFile, local: int) -> Iterable[tuple[int, Any, bool]]:
        """(number in the file, batch, whether it is used where it is in the file)."""
        if file.format == "parquet":
            _check_unchanged(file)
            with pyarrow("pyarrow.parquet").ParquetFile(file.path, memory_map=True) as parquet:
                # No threads: workers and reader processes are parallel already.
                table = parquet.read_row_group(local, columns=self._columns, use_threads=False)
            yield local, self._batch_of([table.column(name).combine_chunks() for name in self._columns]), False
        elif file.format == "file":
            if file.path not in self._readers:
                mapping = _map(file)
                self._readers[file.path] = mapping, pyarrow().ipc.open_file(mapping)
            mapping, reader = self._readers[file.path]
            yield local, *self._chosen(reader.get_batch(local), mapping)
        else:
            mapping = _map(file)
            for i, batch in enumerate(pyarrow().ipc.open_stream(mapping)):
                yield i, *self._chosen(batch, mapping)

    def _chosen(self, batch: Any, mapping: Any) -> tuple[Any, bool]:
        """The chosen columns, and whether their memory is the file's."""
        batch.validate()
        arrays = [batch.column(name) for name in self._columns]
        buffers = (buffer for array in arrays for buffer in array.buffers() if buffer is not None and buffer.size)
        in_file = range(mapping.address, mapping.address + mapping.size)
        return self._batch_of(arrays), all(buffer.address in in_file for buffer in buffers)

    def _batch_of(self, arrays: list[Any]) -> Any:
        """A new batch, without metadata, which may differ from file to file."""
        return pyarrow().RecordBatch.from_arrays(arrays, names=self._columns)

    def _keep_decoded(self, number: int, batch: Any) -> None:
        if number not in self._decoded:
            self._decoded[number] = batch
            self._decoded_bytes += batch.nbytes
        while self._decoded_bytes > self._max_decoded_bytes:
            _, oldest = self._decoded.popitem(last=False)
            self._decoded_bytes -= oldest.nbytes


def _check_unchanged(file: DataFile) -> None:
    """Compares the contents alone: a copy on another machine may have another modification time."""
    if _identify(file.path)[1] != file.content:
        raise SampleError(
            f"{file.path} has changed since the run started: restore the file, or start a new run", file=file.path
        )


def _map(file: DataFile) -> Any:
    """The bytes of a file, mapped for as long as anything points into them. The file itself is closed."""
    _check_unchanged(file)
    with pyarrow().memory_map(file.path) as mapped:
        return mapped.read_buffer()
