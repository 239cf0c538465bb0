"""Reading a step's numbers some steps late, so that the host does not wait for its device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class DeferredReader(Generic[T]):
    """Calls `read` with every added item, in order, some items later.

    lag: read an item once this many newer ones have been added; the same on every worker. By then an asynchronous copy
    from the device has usually finished; if not, `read` waits for that copy alone.
    batch: read about this many items at a time, which is cheaper where a step takes microseconds.
    is_ready: read an item only when this returns True, so that `read` never waits; depends on the worker's speed.
    """

    def __init__(
        self,
        read: Callable[[T], object],
        lag: int = 0,
        *,
        batch: int = 1,
        is_ready: Callable[[T], bool] = lambda _: True,
    ) -> None:
        self._read = read
        self._lag = lag
        self._batch = batch
        self._is_ready = is_ready
        self._pending: deque[T] = deque()

    def add(self, item: T) -> None:
        pending = self._pending
        pending.append(item)
        if len(pending) >= self._lag + self._batch:
            while len(pending) > self._lag and self._is_ready(pending[0]):
                self._read(pending.popleft())

    def flush(self) -> None:
        """Read all pending items, waiting for them where necessary."""
        while self._pending:
            self._read(self._pending.popleft())

    def clear(self) -> None:
        """Discard all pending items."""
        self._pending.clear()
