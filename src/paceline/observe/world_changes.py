"""Workers that left and joined a run, from its log of events."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.observe.json_lines import LineReader
from paceline.observe.run_files import RunFiles


@dataclass(frozen=True)
class WorldChange:
    """After `step`, so many workers left and joined; `size` were there afterwards. seconds: what it cost them."""

    step: int
    num_left: int
    num_joined: int
    size: int
    seconds: float

    @property
    def label(self) -> str:
        """Such as "-1" or "-1 +2"."""
        parts = [f"-{self.num_left}"] * (self.num_left > 0) + [f"+{self.num_joined}"] * (self.num_joined > 0)
        return " ".join(parts)


def read_world_changes(files: RunFiles) -> list[WorldChange]:
    """In the order of their steps; empty if there is no readable log."""
    if not files.events.is_file():
        return []
    found = []
    for record in LineReader(files.events).read():
        details = record.get("details")
        if record.get("event") == "world" and isinstance(details, dict):
            try:
                numbers = len(details["left"]), len(details["joined"]), int(details["size"]), float(details["seconds"])
                found.append(WorldChange(int(record["step"]), *numbers))
            except (KeyError, TypeError, ValueError):  # written by another version
                continue
    return found


def describe_changes(changes: list[WorldChange]) -> str:
    """For a summary: "2 left, 1 joined, 0.31 s lost"."""
    left, joined = sum(each.num_left for each in changes), sum(each.num_joined for each in changes)
    parts = [f"{left} left"] * (left > 0) + [f"{joined} joined"] * (joined > 0)
    return ", ".join([*parts, f"{sum(each.seconds for each in changes):.2g} s lost"])
