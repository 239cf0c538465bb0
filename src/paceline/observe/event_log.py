"""What happened beside the steps, as JSON lines in `events.jsonl`."""

from __future__ import annotations

from pathlib import Path
from time import time

from paceline.core.events import Event
from paceline.observe.json_lines import LineWriter


class EventLog:
    """Writes events down; `trainer.listen(log.write)`. For rank 0, since every worker sees the same events."""

    def __init__(self, path: Path) -> None:
        self._lines = LineWriter(path)

    def write(self, event: Event) -> None:
        """`time` is Unix time, so that events can be laid beside other programs' logs."""
        self._lines.write(
            {"time": round(time(), 3), "step": event.step, "event": event.name, "details": dict(event.details)}
        )

    def close(self) -> None:
        self._lines.close()
