"""Text that UTF-8 lacks, such as the name of a run's folder in another encoding, in our JSON."""

from __future__ import annotations

import json
import os

from paceline.observe.json_lines import to_json


def test_paths_in_any_encoding_are_written_and_read_again() -> None:
    record = {"folder": os.fsdecode(b"caf\xe9"), "name": "café", "loss": float("nan")}
    for value in (record, {"folder": record["folder"]}):
        text = to_json(value)
        assert json.loads(text.encode())["folder"] == record["folder"]
    assert "café" in to_json(record)
