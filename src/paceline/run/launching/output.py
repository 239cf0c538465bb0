"""The output of workers in files: redirected there by the worker, and shown by the launcher."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

# Between the output of two starts in the same file. It is not shown.
_HEADING = re.compile(rb"\n--- [-\d]+ [:\d]+: start \d+\n")


def output_file(folder: Path, rank: int, stream: str) -> Path:
    """Where the worker's output goes with `logs`; `stream` is "out" or "err"."""
    return folder / f"rank-{rank}.{stream}"


# Names the folder of a worker's output, if it goes to files.
LOGS_VARIABLE = "PACELINE_LOGS"


def show_output() -> None:
    """Append this worker's output to the files of rank 0 from now on, which the launcher shows."""
    if folder := os.environ.get(LOGS_VARIABLE):
        for name in ("out", "err"):
            _append_to(output_file(Path(folder), 0, name), getattr(sys, f"std{name}"))


def redirect_output(folder: Path, rank: int, num_restarts: int) -> None:
    """Append both streams to files, including the output of native code and of child processes."""
    os.environ[LOGS_VARIABLE] = str(folder)
    for name in ("out", "err"):
        stream = getattr(sys, f"std{name}")
        _append_to(output_file(folder, rank, name), stream)
        file = _OutputFile(stream.fileno(), "w", closefd=False)
        if name == "err" and os.fstat(stream.fileno()).st_size > 0:
            file.write(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')}: start {num_restarts + 1}\n".encode())
        # Line buffering: a crash keeps all complete lines.
        text = io.TextIOWrapper(io.BufferedWriter(file), "utf-8", "backslashreplace", line_buffering=True)
        setattr(sys, f"std{name}", text)


def _append_to(path: Path, stream: TextIO) -> None:
    """From now on the stream's descriptor, also in child processes, appends to this file."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    stream.flush()
    os.dup2(file, stream.fileno())
    os.close(file)


class _OutputFile(io.FileIO):
    """Loses output when the disk is full, because a print must not end the run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


@contextmanager
def follow_output(folder: Path | None, *, shows_rank_0: bool) -> Iterator[Callable[[], None]]:
    """Create the folder; yields a function that copies rank 0's new output to this process's stdout and stderr.

    It is called once more at the end of the block. Without a folder it does nothing.
    """
    with ExitStack() as files:
        followers = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for name, stream in (("out", sys.stdout), ("err", sys.stderr)) if shows_rank_0 else ():
                file = files.enter_context(output_file(folder, 0, name).open("a+b"))  # at the end of earlier runs
                followers.append(Follower(file, stream))

        def copy_all() -> None:
            for follower in followers:
                follower.copy()

        try:
            yield copy_all
        finally:
            copy_all()


class Follower:
    """Copies what is appended to a file to a stream."""

    def __init__(self, file: IO[bytes], stream: TextIO) -> None:
        self._file = file
        self._stream = stream
        self._has_failed = False
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def copy(self) -> None:
        if (new := _HEADING.sub(b"", self._file.read())) and not self._has_failed:
            try:
                self._stream.write(self._decode(new))
                self._stream.flush()
            except (OSError, ValueError):  # its reader is gone, or the disk is full: the run continues
                self._has_failed = True
