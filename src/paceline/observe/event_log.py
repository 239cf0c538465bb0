"""What happened beside the steps, as JSON lines in `events.jsonl`."""

from __future__ import annotations

from pathlib import Path
from time import time

from paceline.core.events import Event
from paceline.observe.best_effort import BestEffort
from paceline.observe.json_lines import LineWriter


class EventLog:
    """Writes events down; `trainer.listen(log.write)`. For rank 0, since every worker sees the same events.

    A file that cannot be written is a warning and ends nothing.
    """

    def __init__(self, path: Path) -> None:
        self._lines = BestEffort(path, lambda: LineWriter(path), LineWriter.close)

    def write(self, event: Event) -> None:
        """`time` is Unix time, so that events can be laid beside other programs' logs."""
        record = {"time": round(time(), 3), "step": event.step, "event": event.name, "details": dict(event.details)}
        self._lines.use(lambda lines: lines.write(record))

    def close(self) -> None:
        self._lines.close()
