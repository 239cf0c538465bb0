"""Shows the output that workers write to files in the launcher's own streams."""

from __future__ import annotations

import codecs
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TextIO

from paceline.run.launching.worker import output_file

POLL_S = 0.1


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
        is_over = threading.Event()

        def follow() -> None:
            is_last = False
            while not is_last:
                is_last = is_over.wait(POLL_S)
                for follower in followers:
                    follower.copy()

        thread = threading.Thread(target=follow, name="paceline-output", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


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
