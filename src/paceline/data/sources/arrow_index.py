"""What is in Arrow and Parquet files: rows and columns, remembered from one start to the next.

An index is a JSON file for each folder of data. An entry holds as long as its file's size, time of change, first and
last 4 KiB stay the same; so a second start reads these few bytes and leaves the rest of the file alone.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zlib import crc32

from paceline.core.optional import pyarrow

_VERSION = 1
_SAMPLED_BYTES = 4096
# What an Arrow stream ends with: without it, nobody can tell whether the last record batches are missing.
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class DataFile:
    """A file's format (file, stream or parquet), the rows of each of its record batches, its columns' types by name.

    Parquet's row groups count as record batches. `mtime_ns` and `content` tell whether the file is still the same.
    """

    path: str
    mtime_ns: int
    content: str
    format: str
    batch_rows: tuple[int, ...]
    columns: dict[str, str]


def one_line(error: Exception) -> str:
    """An error of pyarrow's, some of which span several lines."""
    return " ".join(str(error).split())


def cache_folder() -> Path:
    """Where indexes are kept: $PACELINE_CACHE, or ~/.cache/paceline."""
    return Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline")


def index_files(paths: Sequence[str]) -> list[DataFile]:
    """An entry for each file, from the index where it still holds."""
    by_folder: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        by_folder[os.path.dirname(path)].append(path)  # noqa: PTH120 - thousands of paths, each a string already
    entries: dict[str, DataFile] = {}
    for folder, members in by_folder.items():
        entries |= _index_folder(folder, members)
    return [entries[path] for path in paths]


def _index_folder(folder: str, paths: Sequence[str]) -> dict[str, DataFile]:
    index_path = cache_folder() / "arrow" / f"{blake2b(folder.encode(), digest_size=16).hexdigest()}.json"
    known = _load(index_path)
    entries = {}
    for path in paths:
        mtime_ns, content = fingerprint(path)
        entry = known.get(path)
        if entry is None or (entry.mtime_ns, entry.content) != (mtime_ns, content):
            entry = _scan(path, mtime_ns, content)
        entries[path] = entry
    if any(entries[path] is not known.get(path) for path in paths):
        others = {path: entry for path, entry in known.items() if Path(path).exists()}
        _save(index_path, others | entries)
    return entries


def fingerprint(path: str) -> tuple[int, str]:
    """When a file was changed, and its size with a checksum of its first and last bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise type(error)(f"cannot open data file {path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        head = os.pread(descriptor, _SAMPLED_BYTES, 0)
        tail = os.pread(descriptor, _SAMPLED_BYTES, max(0, status.st_size - _SAMPLED_BYTES))
    finally:
        os.close(descriptor)
    # Guards against a change that size and time do not show, not against an attack.
    return status.st_mtime_ns, f"{status.st_size}-{crc32(tail, crc32(head)):08x}"


def _load(index_path: Path) -> dict[str, DataFile]:
    """The entries of an index; none where there is no index, or an unreadable one."""
    try:
        index = json.loads(index_path.read_bytes())
        if index["version"] != _VERSION:
            return {}
        entries = [DataFile(**entry | {"batch_rows": tuple(entry["batch_rows"])}) for entry in index["files"]]
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return {entry.path: entry for entry in entries}


def _save(index_path: Path, entries: dict[str, DataFile]) -> None:
    """Written beside and renamed: readers see the old index or the new one. That it cannot be kept is no error."""
    text = json.dumps({"version": _VERSION, "files": [asdict(entry) for entry in entries.values()]})
    with suppress(OSError):
        index_path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=index_path.parent, suffix=".tmp")
        try:
            os.close(descriptor)
            Path(temporary).write_text(text)
            Path(temporary).replace(index_path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)


def _scan(path: str, mtime_ns: int, content: str) -> DataFile:
    pa = pyarrow()
    with Path(path).open("rb") as file:
        magic = file.read(6)
    format, scan = ("stream", _scan_stream)
    if magic == b"ARROW1":
        format, scan = ("file", _scan_file)
    elif magic[:4] == b"PAR1":
        format, scan = ("parquet", _scan_parquet)
    try:
        schema, batch_rows = scan(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is corrupt or truncated, or neither an Arrow nor a Parquet file: {one_line(error)}: write it again"
        ) from error
    names = [field.name for field in schema]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{path} has the columns {names}: it needs at least one, and each name once")
    columns = {field.name: str(field.type) for field in schema}
    return DataFile(path, mtime_ns, content, format, tuple(batch_rows), columns)


def _scan_file(path: str) -> tuple[Any, list[int]]:
    pa = pyarrow()
    # One column tells the number of rows; others need not be decompressed.
    options = pa.ipc.IpcReadOptions(included_fields=[0])
    with pa.memory_map(path) as file:
        schema = pa.ipc.open_file(file).schema
        reader = pa.ipc.open_file(file, options=options)
        return schema, [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]


def _scan_stream(path: str) -> tuple[Any, list[int]]:
    pa = pyarrow()
    options = pa.ipc.IpcReadOptions(included_fields=[0])
    with pa.memory_map(path) as file:
        schema = pa.ipc.open_stream(file).schema
        file.seek(0)
        batch_rows = [batch.num_rows for batch in pa.ipc.open_stream(file, options=options)]
        file.seek(max(0, file.size() - len(_END_OF_STREAM)))
        if file.read() != _END_OF_STREAM:
            raise pa.ArrowInvalid("it does not end with the mark of a closed stream")
    return schema, batch_rows


def _scan_parquet(path: str) -> tuple[Any, list[int]]:
    with pyarrow("pyarrow.parquet").ParquetFile(path) as file:
        metadata = file.metadata
        return file.schema_arrow, [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
