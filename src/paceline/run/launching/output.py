"""The output of workers in files: redirected there by the worker, and shown by the launcher."""

from __future__ import annotations

import codecs
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

POLL_S = 0.1


def output_file(folder: Path, rank: int, stream: str) -> Path:
    """Where the worker's output goes with `logs`; `stream` is "out" or "err"."""
    return folder / f"rank-{rank}.{stream}"


def redirect_output(folder: Path, rank: int, num_restarts: int) -> None:
    """Append both streams to files, including the output of native code and of child processes."""
    for name in ("out", "err"):
        stream = getattr(sys, f"std{name}")
        file = os.open(output_file(folder, rank, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if name == "err" and os.fstat(file).st_size > 0:
            os.write(file, f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')}: start {num_restarts + 1}\n".encode())
        stream.flush()
        os.dup2(file, stream.fileno())
        os.close(file)
        buffer = io.BufferedWriter(_OutputFile(stream.fileno(), "w", closefd=False))
        # Line buffering: a crash keeps all complete lines.
        setattr(sys, f"std{name}", io.TextIOWrapper(buffer, "utf-8", "backslashreplace", line_buffering=True))


class _OutputFile(io.FileIO):
    """Loses output when the disk is full, because a print must not end the run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


@contextmanager
def polling(poll: Callable[[], object], interval_s: float, name: str) -> Iterator[None]:
    """Call `poll` in a thread at this interval while the block runs, and once more at its end."""
    is_over = threading.Event()

    def repeat() -> None:
        is_last = False
        while not is_last:
            is_last = is_over.wait(interval_s)
            poll()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def follow_output(folder: Path, ranks: list[int]) -> Iterator[None]:
    """Create the folder, and copy what these ranks append to their files to this process's stdout and stderr."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:
        followers = []
        for rank in ranks:
            for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
                file = files.enter_context(output_file(folder, rank, name).open("a+b"))  # at the end of earlier runs
                followers.append(Follower(file, stream))

        def copy_all() -> None:
            for follower in followers:
                follower.copy()

        with polling(copy_all, POLL_S, "paceline-output"):
            yield


class Follower:
    """Copies what is appended to a file to a stream."""

    def __init__(self, file: IO[bytes], stream: TextIO) -> None:
        self._file = file
        self._stream = stream
        self._has_failed = False
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def copy(self) -> None:
        if (new := self._file.read()) and not self._has_failed:
            try:
                self._stream.write(self._decode(new))
                self._stream.flush()
            except (OSError, ValueError):  # its reader is gone, or the disk is full: the run continues
                self._has_failed = True
