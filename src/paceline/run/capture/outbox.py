"""Numbers that replayed steps leave for the host, brought there many at a time.

A replay leaves its loss where the next one overwrites it, and to copy each to the host takes the host as long as to
launch a whole small step. So each is put aside on the device, by the same kernel that brings the next batch in; the
host gets a sheet of them when it is full, or when somebody asks for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TypeAlias

import torch

from paceline.sync.numbers import HostCopy

ROWS = 32

# What to copy where.
Copies: TypeAlias = tuple[list[torch.Tensor], list[torch.Tensor]]


class Outbox:
    """Collects what one graph's replays leave: a few tensors of one number each, at fixed places.

    Around a replay, under `lock`: copy what `pending` says, replay, and `add`. Anybody may ask an entry for its number.
    """

    def __init__(self, left: Sequence[torch.Tensor]) -> None:
        self._left = [tensor.detach().reshape(()) for tensor in left]
        # A coarser number is the same number in a finer type.
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in left) else torch.float32
        self._sheet = torch.zeros(ROWS, len(left), dtype=dtype, device=left[0].device)
        self._rows = [list(row.unbind()) for row in self._sheet]
        self._page = _Page(self)
        self._num_rows = 0
        self._is_pending = False
        self.lock = Lock()

    def pending(self) -> Copies:
        """What the last replay left, if it was not copied yet: it must be before the next one."""
        if not self._is_pending:
            return [], []
        self._is_pending = False
        return self._rows[self._num_rows - 1], self._left

    def add(self) -> list[Entry]:
        """The graph was replayed: its numbers, in their order."""
        if self._num_rows == ROWS:
            self._send()
        row = self._num_rows
        self._num_rows += 1
        self._is_pending = True
        return [Entry(self._page, row, column) for column in range(len(self._left))]

    def settle(self) -> None:
        """Copy what the last replay left now."""
        with self.lock:
            self._settle()

    def send(self, page: _Page) -> None:
        """Bring this page to the host, unless that was done already."""
        with self.lock:
            if page is self._page:
                self._settle()
                self._send()

    def _settle(self) -> None:
        places, left = self.pending()
        for place, value in zip(places, left, strict=True):
            place.copy_(value)

    def _send(self) -> None:
        self._page.source = self._sheet.flatten().tolist() if self._sheet.is_cpu else HostCopy(self._sheet.flatten())
        self._page = _Page(self)
        self._num_rows = 0


class Outboxes:
    """Those of graphs that share their memory: what one left must be settled before another runs."""

    def __init__(self) -> None:
        self._last: Outbox | None = None

    def turn_to(self, outbox: Outbox | None) -> None:
        """The graph of this one is about to run; None: one that has none."""
        if self._last is not None and self._last is not outbox:
            self._last.settle()
        self._last = outbox


class _Page:
    """What the sheet held at one time."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.source: list[float] | HostCopy | None = None  # None: not sent

    def values(self) -> list[float]:
        if self.source is None:
            self._outbox.send(self)
        if isinstance(self.source, HostCopy):
            self.source = self.source.tolist()
        assert self.source is not None
        return self.source


class Entry:
    """A number of one step. Asking for it waits for the device."""

    __slots__ = ("_column", "_page", "_row")

    def __init__(self, page: _Page, row: int, column: int) -> None:
        self._page = page
        self._row = row
        self._column = column

    @property
    def has_arrived(self) -> bool:
        source = self._page.source
        return source is not None and (isinstance(source, list) or source.has_arrived)

    def item(self) -> float:
        values = self._page.values()
        return values[self._row * (len(values) // ROWS) + self._column]

    def tolist(self) -> list[float]:
        return [self.item()]
