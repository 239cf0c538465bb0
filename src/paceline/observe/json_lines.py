"""Files of JSON lines: appended by one process, read by others meanwhile, whole after a crash.

A line is written by one system call, so a reader sees all of it or, while it is on its way, a piece without a newline
at the end of the file. A process that is killed there leaves such a piece behind: readers pass over it, and the next
writer cuts it off. JSON has no word for a number that is not finite; "NaN", "Infinity" and "-Infinity" stand for them
as text, which every JSON reader takes, and are numbers again when read here.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_BLOCK_BYTES = 1 << 16


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
        line = f"{to_json(record)}\n".encode()
        size = os.fstat(self._descriptor).st_size
        if os.write(self._descriptor, line) != len(line):
            os.ftruncate(self._descriptor, size)
            raise OSError(errno.ENOSPC, "no space left for a line", str(self.path))

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
    num_lines = text.count(b"\n")
    try:
        # One call for all is several times faster than one for each.
        records = json.loads(b"[%s]" % text[:-1].replace(b"\n", b","))
    except (ValueError, RecursionError):
        records = None
    if records is None or len(records) != num_lines:
        records = [_parse_one(line) for line in text.split(b"\n")[:-1]]
    if b'NaN"' in text or b'Infinity"' in text:
        records = [_restored(record) for record in records]
    return [record for record in records if isinstance(record, dict)]


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
