"""A run's events: their log, their text, and the changes of workers that they record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from time import time
from typing import Any

from paceline.core.events import Event
from paceline.observe import formats
from paceline.observe.best_effort import BestEffort
from paceline.observe.json_lines import LineReader, LineWriter
from paceline.observe.run_files import RunFiles


class EventLog:
    """Events of a run, such as a changed plan, as JSON lines in `events.jsonl`: `trainer.listen(log.write)`.

    For rank 0, since all workers see the same events.
    """

    def __init__(self, path: Path) -> None:
        self._lines = BestEffort(path, lambda: LineWriter(path), LineWriter.close)

    def write(self, event: Event) -> None:
        """`time` is Unix time, for comparison with other programs' logs."""
        record = {"time": round(time(), 3), "step": event.step, "event": event.name, "details": dict(event.details)}
        self._lines.use(lambda lines: lines.write(record))

    def close(self) -> None:
        self._lines.close()


def event_text(name: str, details: Mapping[str, Any]) -> str:
    """One line. Unknown events are shown with their details."""
    try:
        text = _TEXTS[name](details)
    except (KeyError, TypeError, ValueError):  # of another kind, or written by another version
        shown = ", ".join(f"{key} {value}" for key, value in details.items())
        text = f"{name}: {shown}" if shown else name
    return formats.one_line(text)


def _plan(details: Mapping[str, Any]) -> str:
    shares, before = (":".join(map(str, details[key])) for key in ("shares", "before"))
    return f"shares {shares}, before {before}" if before else f"shares {shares}"


def _world(details: Mapping[str, Any]) -> str:
    left, joined, size = details.get("left") or [], details.get("joined") or [], details["size"]
    parts = [f"{_workers(left)} left"] if left else []
    parts += [f"{_workers(joined)} joined"] if joined else []
    text = " and ".join(parts) or "the workers changed"
    text += f" ({details['reason']})" if details.get("reason") else ""
    text += f"; {size} worker{'s continue' if size != 1 else ' continues'}"
    text += f" without {details['lost_steps']} steps that were not averaged yet" if details.get("lost_steps") else ""
    return text + (f" after {formats.duration(details['seconds'])}" if details.get("seconds") is not None else "")


def _workers(ranks: list[Any]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _capture(details: Mapping[str, Any]) -> str:
    if details.get("reason") is not None:
        return f"no CUDA graph of a {details['what']}: {details['reason']}"
    return f"captured a CUDA graph of a {details['what']}"


_TEXTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "plan": _plan,
    "save": lambda details: f"saved {PurePath(details['folder']).name}",
    "world": _world,
    "drift": lambda d: f"replicas drift apart by {d['drift']:.3g}: averaging every {d['every']} steps",
    "capture": _capture,
    "averaging": lambda details: str(details["reason"]),
}


@dataclass(frozen=True)
class WorldChange:
    """Workers left and joined after `step`; `size` remained. seconds: the duration of the change."""

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
    found: list[WorldChange] = []
    with suppress(OSError):
        # Of a long run most events are changed plans.
        blocks = LineReader(files.events).blocks(containing=b'"world"') if files.events.is_file() else ()
        for record in chain.from_iterable(blocks):
            with suppress(KeyError, TypeError, ValueError, OverflowError):  # written by another version
                details = record["details"] if record["event"] == "world" else {}
                numbers = len(details["left"]), len(details["joined"]), int(details["size"]), float(details["seconds"])
                found.append(WorldChange(int(record["step"]), *numbers))
    return found


def describe_changes(changes: list[WorldChange]) -> str:
    """For a summary: "2 left, 1 joined, 0.31 s lost"."""
    left, joined = sum(each.num_left for each in changes), sum(each.num_joined for each in changes)
    parts = [f"{left} left"] * (left > 0) + [f"{joined} joined"] * (joined > 0)
    return ", ".join([*parts, f"{sum(each.seconds for each in changes):.2g} s lost"])
