"""Workers that left and joined, as the summary and the plots show them."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.observe.events import WorldChange, describe_changes, read_world_changes
from paceline.observe.run_files import prepare_run_folder


def test_changes_are_read_from_the_events_and_described(tmp_path: Path) -> None:
    files = prepare_run_folder(tmp_path / "run")
    assert read_world_changes(files) == []
    details = {"generation": 1, "size": 2, "left": [0], "joined": [], "reason": "killed", "seconds": 0.25}
    events = [
        {"step": 3, "event": "plan", "details": {"shares": [1, 1]}},
        {"step": 10, "event": "world", "details": details},
        {"step": 12, "event": "world", "details": {**details, "size": 4, "left": [1], "joined": [2, 3]}},
        {"step": 13, "event": "world", "details": {"size": "of another version"}},
        {"step": 14, "event": "world", "details": {**details, "size": "Infinity"}},
    ]
    files.events.write_text("".join(f"{json.dumps({'time': 1.0, **event})}\n" for event in events))
    changes = read_world_changes(files)
    assert changes == [WorldChange(10, 1, 0, 2, 0.25), WorldChange(12, 1, 2, 4, 0.25)]
    assert [change.label for change in changes] == ["-1", "-1 +2"]
    assert describe_changes(changes) == "2 left, 2 joined, 0.5 s lost"
