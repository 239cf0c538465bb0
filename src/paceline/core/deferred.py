"""Reading a step's numbers some steps late, so that the host does not wait for its device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class DeferredReader(Generic[T]):
    """Calls `read` with every added item, in order, some items later.

    lag: read an item once this many newer ones have been added; the same on every worker. By then an asynchronous copy
    from the device has usually finished; if not, `read` waits for that copy alone.
    batch: read about this many items at a time, which is cheaper where a step takes microseconds.
    is_ready: read an item only when this returns True, so that `read` never waits; depends on the worker's speed.
    """

    read: Callable[[T], object]
    lag: int = 0
    _: KW_ONLY
    batch: int = 1
    is_ready: Callable[[T], bool] = lambda _: True
    _pending: deque[T] = field(default_factory=deque, init=False)

    def add(self, item: T) -> None:
        pending = self._pending
        pending.append(item)
        if len(pending) >= self.lag + self.batch:
            while len(pending) > self.lag and self.is_ready(pending[0]):
                self.read(pending.popleft())

    def flush(self) -> None:
        """Read all pending items, waiting for them where necessary."""
        while self._pending:
            self.read(self._pending.popleft())

    def clear(self) -> None:
        """Discard all pending items."""
        self._pending.clear()
