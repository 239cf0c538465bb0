"""Numbers of replayed steps, copied to the host in blocks.

The next replay overwrites the loss of the last one, and copying each to the host would take as long as launching a
small step. So they are collected on the device, by the same kernel that copies the next batch, and a full block is
copied to the host. Reading a number copies its block at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TypeAlias

import torch

from paceline.sync.numbers import HostCopy

ROWS = 32

# Targets and sources of copies.
Copies: TypeAlias = tuple[list[torch.Tensor], list[torch.Tensor]]


class Outbox:
    """Collects the outputs of one graph's replays: a few tensors of one number each, at fixed addresses.

    For each replay, holding `lock`: make the copies of `pending`, replay, and `add`.
    """

    def __init__(self, left: Sequence[torch.Tensor]) -> None:
        self._left = [tensor.detach().reshape(()) for tensor in left]
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in left) else torch.float32
        self._sheet = torch.zeros(ROWS, len(left), dtype=dtype, device=left[0].device)
        self._rows = [list(row.unbind()) for row in self._sheet]
        self._page = _Page(self)
        self._num_rows = 0
        self._is_pending = False
        self.lock = Lock()

    def pending(self) -> Copies:
        """The copies that must be made before the next replay."""
        if not self._is_pending:
            return [], []
        self._is_pending = False
        return self._rows[self._num_rows - 1], self._left

    def add(self) -> list[Entry]:
        """After a replay: its numbers, in order."""
        if self._num_rows == ROWS:
            self._send()
        row = self._num_rows
        self._num_rows += 1
        self._is_pending = True
        return [Entry(self._page, row, column) for column in range(len(self._left))]

    def settle(self) -> None:
        """Make the pending copies now."""
        with self.lock:
            self._settle()

    def send(self, page: _Page) -> None:
        """Copy this page to the host, if it was not copied yet."""
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
    """The outboxes of graphs that share memory: pending copies of one are made before another graph runs."""

    def __init__(self) -> None:
        self._last: Outbox | None = None

    def turn_to(self, outbox: Outbox | None) -> None:
        """Call before running the graph of this outbox; None for a graph without one."""
        if self._last is not None and self._last is not outbox:
            self._last.settle()
        self._last = outbox


class _Page:
    """One filling of the block."""

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
    """A number of one step. Reading it waits for the device."""

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
