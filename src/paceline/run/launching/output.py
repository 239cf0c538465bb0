"""Show here what workers write into their files."""

from __future__ import annotations

import codecs
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TextIO

from paceline.run.launching.worker import OUTPUT_NAMES, output_file

FOLLOW_S = 0.1


@contextmanager
def shown(folder: Path, ranks: Iterable[int]) -> Iterator[None]:
    """Make the folder, and copy what these ranks append to their files to this process's streams, at the end all."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:
        followed = []
        for path, stream in [(output_file(folder, r, n), s) for r in ranks for n, s in _streams().items()]:
            path.touch()
            followed.append(_Followed(files.enter_context(path.open("rb")), stream))
        is_over = threading.Event()

        def follow() -> None:
            while not is_over.wait(FOLLOW_S):
                for file in followed:
                    file.copy()

        thread = threading.Thread(target=follow, name="paceline-output", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            for file in followed:
                file.copy()


def _streams() -> dict[str, TextIO]:
    return dict(zip(OUTPUT_NAMES, (sys.stdout, sys.stderr), strict=True))


class _Followed:
    def __init__(self, file: IO[bytes], stream: TextIO) -> None:
        self._file = file
        self._file.seek(0, 2)  # what is there is of an earlier run
        self._stream = stream
        self._has_failed = False
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def copy(self) -> None:
        if (new := self._file.read()) and not self._has_failed:
            try:
                self._stream.write(self._decode(new))
                self._stream.flush()
            except (OSError, ValueError):  # whoever read it is gone, or its disk is full: the run goes on
                self._has_failed = True
