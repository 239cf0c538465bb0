"""Files of JSON lines: appended by one process, read by others meanwhile, whole after a crash.

A line is written by one system call, so a reader sees all of it or, while it is on its way, a piece without a newline
at the end of the file. A process that is killed there leaves such a piece behind: readers pass over it, and the next
writer cuts it off. JSON has no word for a number that is not finite; "NaN", "Infinity" and "-Infinity" stand for them
as text, which every JSON reader takes, and are numbers again when read here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_BLOCK_BYTES = 1 << 16
_READ_BYTES = 1 << 20
# A longer line was not written here.
MAX_LINE_BYTES = 16 << 20


class LineWriter:
    """Appends objects to a file, one line each. For one process at a time; the file is made if it is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        _cut_torn_line(self._descriptor)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line, or nothing: what does not fit on the disk is taken back before the error is raised."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed: nothing can be written any more")
        # What UTF-8 lacks, such as a byte of a file name, is an escape that JSON readers undo.
        line = f"{to_json(record)}\n".encode("utf-8", "backslashreplace")
        size = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # the disk is full, as the next call says, or a signal came
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            with suppress(OSError):  # no file that can be cut, such as a device
                os.ftruncate(self._descriptor, size)
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """Safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class LineReader:
    """Reads a file that may still grow: each `read` returns the objects whose lines were added since the last.

    `num_unreadable` counts the lines passed over because they hold no JSON object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_unreadable = 0
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        with self.path.open("rb") as file:
            file.seek(self._offset)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = _parse(whole)
        self.num_unreadable += whole.count(b"\n") - len(records)
        return records


class Blocks:
    """A file's lines as JSON values, a block of lines at a time. `num_unreadable`: those that are no JSON, or longer
    than `MAX_LINE_BYTES`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_unreadable = 0

    def parsed(self, containing: bytes = b"") -> Iterator[list[Any]]:
        """Each block's values; of lines that do not contain these bytes, none."""
        for lines in self._whole_lines():
            if containing in lines:
                if containing:
                    lines = b"".join(line for line in lines.splitlines(keepends=True) if containing in line)
                values = _parse_lines(lines)
                readable = [value for value in values if value is not None]
                self.num_unreadable += len(values) - len(readable)
                yield readable

    def _whole_lines(self) -> Iterator[bytes]:
        rest = b""
        with self._path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                end = block.rfind(b"\n") + 1
                if end:
                    yield rest + block[:end]
                    rest = block[end:]
                elif len(rest) + len(block) <= MAX_LINE_BYTES:
                    rest += block
                else:
                    rest = block[:0]
                    self.num_unreadable += 1
                    _skip_line(file)


def _skip_line(file: BinaryIO) -> None:
    while block := file.read(_READ_BYTES):
        if (end := block.find(b"\n")) >= 0:
            file.seek(end + 1 - len(block), os.SEEK_CUR)
            return


def read_last_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in the last lines of a file, however long it is."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _BLOCK_BYTES))
        ending = file.read()
    return _parse(ending[: ending.rfind(b"\n") + 1])


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON that every reader takes. What JSON does not know becomes its number, if it is a scalar, or its text."""
    separators = (",", ":") if indent is None else None
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, default=_known_to_json, separators=separators, indent=indent
        )
    except ValueError:  # something is not finite, which is rare
        text = json.dumps(_spelled_out(value), ensure_ascii=False, separators=separators, indent=indent)
    # What UTF-8 lacks, such as a byte of a path whose name is not UTF-8, is an escape that JSON readers undo.
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _parse(text: bytes) -> list[dict[str, Any]]:
    """The objects in whole lines; other lines are left out."""
    records = _parse_lines(text)
    if b'NaN"' in text or b'Infinity"' in text:
        records = [_restored(record) for record in records]
    return [record for record in records if isinstance(record, dict)]


def _parse_lines(text: bytes) -> list[Any]:
    """The value of each line, None for one that is no JSON."""
    num_lines = text.count(b"\n")
    try:
        # One call for all is several times faster than one for each.
        records = json.loads(b"[%s]" % text[:-1].replace(b"\n", b","))
    except (ValueError, RecursionError):
        records = None
    if records is None or len(records) != num_lines:
        records = [_parse_one(line) for line in text.split(b"\n")[:-1]]
    return list(records)


def _parse_one(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _known_to_json(value: Any) -> Any:
    """For scalars of torch and NumPy, and for whatever an event's details hold."""
    if isinstance(value, Mapping):
        return dict(value)
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):  # no scalar
        return str(value)


def _spelled_out(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _spelled_out(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled_out(item) for item in value]
    return value if value is None or isinstance(value, str | int) else _spelled_out(_known_to_json(value))


def is_number(value: Any) -> bool:
    """Whether it is a number that a metric may have."""
    return isinstance(value, float) or is_count(value) or (type(value) is int and 0 < -value < 1 << 63)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value


def _cut_torn_line(descriptor: int) -> None:
    """Cut off what follows the last newline."""
    end = size = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - _BLOCK_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(descriptor, end)
