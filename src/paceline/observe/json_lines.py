"""Files of JSON lines: one process appends, others may read at the same time.

Each line is written by one system call. A process killed while writing leaves a line without a newline at the end of
the file: readers skip it, and the next writer truncates it. JSON has no non-finite numbers: they are stored as the
strings "NaN", "Infinity" and "-Infinity", and readers convert them back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
TAIL_BYTES = 1 << 16
_READ_BYTES = 1 << 20
# Longer lines are skipped: no writer of this package produces them.
MAX_LINE_BYTES = 16 << 20


class LineWriter:
    """Appends objects to a file, one line each. Only one process may write; the file is created if missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a+b", buffering=0)
        if size := path.stat().st_size:
            with mmap(self._file.fileno(), size, access=ACCESS_READ) as content:
                num_complete = content.rfind(b"\n") + 1
            self._file.truncate(num_complete)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line. If the disk is full, the partial line is removed before the error is raised."""
        line = f"{to_json(record)}\n".encode()
        descriptor, written = self._file.fileno(), 0
        size = os.fstat(descriptor).st_size
        try:
            while written < len(line):  # a full disk raises in the next call; a signal does not
                written += os.write(descriptor, line[written:])
        except OSError as error:
            with suppress(OSError):  # devices cannot be truncated
                os.ftruncate(descriptor, size)
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """Safe to call twice."""
        self._file.close()


class LineReader:
    """Reads a file that may still grow: each `blocks` or `read` continues after the last complete line.

    tail: start near the end of the file, in the middle of a line. start, stop: read only these bytes. num_unreadable:
    skipped lines, which contain no JSON or are longer than `MAX_LINE_BYTES`. offset: where the next line begins.
    """

    def __init__(self, path: Path, *, tail: bool = False, start: int = 0, stop: int | None = None) -> None:
        found = path.stat()
        self.path = path
        self.num_unreadable = 0
        self.offset = max(0, found.st_size - TAIL_BYTES) if tail else start
        self._stop = stop
        self._inode = found.st_ino

    @property
    def is_current(self) -> bool:
        """Whether the path still leads to the file that was read, which only grew."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        return found.st_ino == self._inode and found.st_size >= self.offset

    def read(self) -> list[dict[str, Any]]:
        """The objects of all new lines."""
        records = []
        for block in self.blocks():
            objects = [value for value in block if isinstance(value, dict)]
            self.num_unreadable += len(block) - len(objects)
            records += objects
        return records

    def blocks(self, containing: bytes = b"") -> Iterator[list[Any]]:
        """The values of all new lines, about a megabyte at a time. containing: skip lines without these bytes."""
        rest = b""
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size  # a file that grows as fast as it is read must not block
            size = size if self._stop is None else min(size, self._stop)
            file.seek(self.offset)
            while block := file.read(max(0, min(_READ_BYTES, size - file.tell()))):
                lines, newline, rest = (rest + block).rpartition(b"\n")
                if len(rest) > MAX_LINE_BYTES:  # its end will not be JSON either
                    rest = b""
                self.offset = file.tell() - len(rest)
                if newline and containing in lines:
                    kept = [line for line in lines.split(b"\n") if containing in line]
                    values = parse_lines(kept)
                    self.num_unreadable += len(kept) - len(values)
                    yield values


def lines_from_end(path: Path, containing: Sequence[bytes]) -> Iterator[Any]:
    """The values of the lines that contain one of these, the last one first."""
    rest = b""
    with path.open("rb") as file:
        for end in range(file.seek(0, os.SEEK_END), 0, -_READ_BYTES):
            start = max(0, end - _READ_BYTES)
            file.seek(start)
            lines = (file.read(end - start) + rest).split(b"\n")
            rest = lines.pop(0) if start else b""
            yield from reversed(parse_lines([line for line in lines if any(each in line for each in containing)]))


def first_line(path: Path) -> Any:
    """The value of the first line; None without one."""
    with path.open("rb") as file:
        line = file.readline(MAX_LINE_BYTES)
    values = parse_lines([line]) if line.endswith(b"\n") else []
    return values[0] if values else None


def parse_lines(lines: Sequence[bytes]) -> list[Any]:
    """The values of these lines. Lines without JSON are left out."""
    # One call for all lines is several times faster than one call per line. The first line may be cut off.
    for kept in (lines, lines[1:]):
        with suppress(ValueError, RecursionError):
            values = json.loads(b"[%s]" % b",".join(kept))
            if len(values) == len(kept):
                break
    else:
        values = []
        for line in lines:
            with suppress(ValueError, RecursionError):
                values.append(json.loads(line))
    has_spelled = any(b'NaN"' in line or b'Infinity"' in line for line in lines)
    return [_restore(value) for value in values] if has_spelled else values


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Standard JSON. Scalars of torch and NumPy become numbers, other unknown objects their `str`."""
    separators = (",", ":") if indent is None else None
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, default=_to_plain, separators=separators, indent=indent
        )
    except ValueError:  # contains a non-finite number
        text = json.dumps(_spell_non_finite(value), ensure_ascii=False, separators=separators, indent=indent)
    # Surrogates, from file names that are not UTF-8, become escapes that JSON readers decode.
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def replace_file(path: Path, content: bytes | Iterable[bytes], *, sync: bool = False) -> None:
    """Replace a file atomically: readers see the old or the new content. sync: also after a power failure.

    content: may be in parts, which may be read from the old file.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_number(value: Any) -> bool:
    """Whether a metric may have this value: a float or a 64-bit integer."""
    return isinstance(value, float) or (type(value) is int and -(1 << 63) < value < 1 << 63)


def number_or_none(value: Any) -> float | None:
    return value if is_number(value) else None


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):  # not a scalar
        return str(value)


def _spell_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _spell_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_non_finite(item) for item in value]
    return value if value is None or isinstance(value, str | int) else _spell_non_finite(_to_plain(value))


def _restore(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restore(item) for key, item in value.items()}
    return [_restore(item) for item in value] if isinstance(value, list) else value
