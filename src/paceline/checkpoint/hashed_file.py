"""Files whose SHA-256 is taken while they are written or read, in one pass."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.checkpoint.errors import CheckpointError

# Small enough to be hashed and written from the processor's cache, large enough that Python costs nothing.
CHUNK_BYTES = 1 << 20

Buffer = bytes | memoryview


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its size in bytes and the SHA-256 of its content."""

    size: int
    sha256: str


class HashingWriter:
    """A new file; an existing one is never written over. With `flush` its content is on the disk after the `with`
    block; leaving that by an error closes the file without waiting for the disk.
    """

    def __init__(self, path: Path, *, flush: bool = True) -> None:
        self.path = path
        self._flush = flush
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, content: Buffer) -> None:
        """Hash and write. Both let other threads run, also for contents of many gigabytes."""
        view = memoryview(content)
        with _naming(self.path):
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                self._hash.update(chunk)
                self._size += len(chunk)
                while chunk:
                    chunk = chunk[os.write(self._descriptor, chunk) :]

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._size, self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._flush:
                with _naming(self.path):
                    os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


class HashingReader:
    """A regular file read from start to end; links are not followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: opening a pipe somebody put there must not wait for its other end.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
        self._hash = hashlib.sha256()
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        self.position = 0
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise CheckpointError(f"{path} is not a regular file")

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes, or raise if the file ends before."""
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            filled = 0
            while filled < len(chunk):
                try:
                    count = os.readv(self._descriptor, [chunk[filled:]])
                except OSError as error:
                    raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
                if count == 0:
                    raise CheckpointError(f"{self.path} ends at byte {self.position}, before its content does")
                filled += count
                self.position += count
            self._hash.update(chunk)

    def read(self, count: int) -> bytes:
        content = bytearray(count)
        self.read_into(memoryview(content))
        return bytes(content)

    def skip_to_end(self) -> None:
        """Hash the rest without keeping it."""
        scratch = memoryview(bytearray(min(CHUNK_BYTES, self.size - self.position)))
        while left := self.size - self.position:
            self.read_into(scratch[:left])

    @property
    def record(self) -> FileRecord:
        """Of what was read so far."""
        return FileRecord(self.position, self._hash.hexdigest())

    def expect_size(self, expected: FileRecord) -> None:
        if self.size != expected.size:
            raise CheckpointError(f"{self.path} has {self.size} bytes, the manifest says {expected.size}")

    def expect(self, expected: FileRecord) -> None:
        """Raise unless what was read is what was written."""
        found = self.record
        if found != expected:
            raise CheckpointError(
                f"{self.path} is damaged: its SHA-256 is {found.sha256}, the manifest says {expected.sha256}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of calls on a descriptor do not say which file it was."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_file(path: Path, content: bytes, *, flush: bool = True) -> FileRecord:
    """A small file, with `flush` on the disk when this returns."""
    with HashingWriter(path, flush=flush) as file:
        file.write(content)
    return file.record


def read_file(path: Path, limit_bytes: int, expected: FileRecord | None = None) -> bytes:
    """A small file; one larger than the limit is refused before it is read."""
    with HashingReader(path) as file:
        if expected is not None:
            file.expect_size(expected)
        if file.size > limit_bytes:
            raise CheckpointError(f"{path} has {file.size} bytes, more than the {limit_bytes} such a file may have")
        content = file.read(file.size)
        if expected is not None:
            file.expect(expected)
        return content


def check_file(path: Path, expected: FileRecord) -> None:
    """Raise unless the file's size and content are as recorded."""
    with HashingReader(path) as file:
        file.expect_size(expected)
        file.skip_to_end()
        file.expect(expected)


def flush_folder(folder: Path) -> None:
    """Put the folder's entries on the disk: names and renames, not contents."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
