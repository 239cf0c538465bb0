"""Events of a run besides its steps, for example a changed plan or diverging replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something that happened after `step` completed steps. Every worker sees the same events."""

    name: str
    step: int
    details: Mapping[str, Any] = field(default_factory=dict)


class Events:
    """Calls listeners. The loop updates `step`, so that emitters need not know it."""

    def __init__(self) -> None:
        self.step = 0
        self._listeners: list[Callable[[Event], object]] = []

    def listen(self, listener: Callable[[Event], object]) -> None:
        self._listeners.append(listener)

    def emit(self, name: str, **details: Any) -> None:
        event = Event(name, self.step, details)
        for listener in self._listeners:
            listener(event)
