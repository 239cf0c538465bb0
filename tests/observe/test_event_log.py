"""events.jsonl."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from paceline.core.events import Event
from paceline.observe.event_log import EventLog
from paceline.observe.json_lines import LineReader


def test_events_are_written_down_whatever_their_details(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    details: dict[str, Any] = {"shares": (6, 2), "drift": math.nan, "path": Path("a"), "tensor": torch.ones(2)}
    log.write(Event("plan", 7, details))
    log.close()
    (record,) = LineReader(path).read()
    assert (record["event"], record["step"]) == ("plan", 7)
    assert record["details"]["shares"] == [6, 2]
    assert record["details"]["path"] == "a"
    assert record["details"]["tensor"] == "tensor([1., 1.])"
    assert math.isnan(record["details"]["drift"])
    assert isinstance(record["time"], float)
