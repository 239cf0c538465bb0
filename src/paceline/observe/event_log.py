"""Events of a run, such as a changed plan, as JSON lines in `events.jsonl`."""

from __future__ import annotations

from pathlib import Path
from time import time

from paceline.core.events import Event
from paceline.observe.best_effort import BestEffort
from paceline.observe.json_lines import LineWriter


class EventLog:
    """Writes events to a file, best effort: `trainer.listen(log.write)`. For rank 0, as all workers see the same."""

    def __init__(self, path: Path) -> None:
        self._lines = BestEffort(path, lambda: LineWriter(path), LineWriter.close)

    def write(self, event: Event) -> None:
        """`time` is Unix time, for comparison with other programs' logs."""
        record = {"time": round(time(), 3), "step": event.step, "event": event.name, "details": dict(event.details)}
        self._lines.use(lambda lines: lines.write(record))

    def close(self) -> None:
        self._lines.close()
