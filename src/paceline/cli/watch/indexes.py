"""The curves of long runs, read in the background: until they are known, pictures are samples."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from time import sleep

from paceline.observe.curve_index import CurveIndex
from paceline.observe.curve_window import Series

# The least recently used ones are forgotten.
MAX_INDEXES = 4
# Until reading begins: the requests of a first picture are answered before.
DELAY_S = 1.0
# An index that is further behind its file is brought up to date in the background.
MAX_BEHIND_BYTES = 2 << 20
# Between two blocks, so that requests are answered meanwhile.
PAUSE_S = 0.002


@dataclass
class _Entry:
    index: CurveIndex
    reading: Thread | None = None
    is_wanted: bool = True

    @property
    def is_reading(self) -> bool:
        return self.reading is not None and self.reading.is_alive()


class Indexes:
    """Thread-safe. One file is read at a time."""

    def __init__(self) -> None:
        self._entries: dict[Path, _Entry] = {}  # the most recently used last
        self._lock = Lock()
        self._turn = Lock()

    def curves(self, path: Path) -> dict[str, Series] | None:
        """All curves of a file as it is now, by name; None while it is being read."""
        with self._lock:
            entry = self._entries.pop(path, None)
            if entry is None or not (entry.is_reading or entry.index.is_current):
                entry = _Entry(CurveIndex(path))
            self._entries[path] = entry
            while len(self._entries) > MAX_INDEXES:
                self._entries.pop(next(iter(self._entries))).is_wanted = False
            if entry.is_reading:
                return None
            if path.stat().st_size - entry.index.num_bytes > MAX_BEHIND_BYTES:
                entry.reading = Thread(target=self._read, args=(entry,), name="paceline-index", daemon=True)
                entry.reading.start()
                return None
            for _ in entry.index.read():
                pass
            return entry.index.curves()

    def _read(self, entry: _Entry) -> None:
        sleep(DELAY_S)
        with self._turn, suppress(OSError):  # the run was deleted
            for _ in entry.index.read():
                if not entry.is_wanted:
                    return
                sleep(PAUSE_S)
            entry.index.curves()  # thins them: less memory
