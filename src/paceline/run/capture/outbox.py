"""Numbers of replayed steps, copied to the host in blocks.

The next replay overwrites the loss of the last one, and copying each to the host would take as long as launching a
small step. So they are collected on the device, by the same kernel that copies the next batch, and a full block is
copied to the host. Reading a number copies its block immediately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import RLock

import torch

from paceline.sync.numbers import HostCopy

ROWS = 32


class Outbox:
    """Collects the outputs of one graph's replays: a few tensors of one number each, at fixed addresses.

    For each replay, holding `lock`: make the copies of `pending`, replay, and `add`.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self._outputs = [tensor.detach().reshape(()) for tensor in outputs]
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in outputs) else torch.float32
        self._block = torch.zeros(ROWS, len(outputs), dtype=dtype, device=outputs[0].device)
        self._rows = [list(row.unbind()) for row in self._block]
        self._num_rows = 0
        self._is_pending = False
        self._page = _Page(self)
        self.lock = RLock()

    def pending(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The copies that must be made before the next replay: their targets and sources."""
        if not self._is_pending:
            return [], []
        self._is_pending = False
        return self._rows[self._num_rows - 1], self._outputs

    def add(self) -> list[Entry]:
        """After a replay: its numbers, in order."""
        if self._num_rows == ROWS:
            self._send()
        first = self._num_rows * len(self._outputs)
        self._num_rows += 1
        self._is_pending = True
        return [Entry(self._page, first + column) for column in range(len(self._outputs))]

    def copy_pending(self) -> None:
        """Make the pending copies now."""
        with self.lock:
            for target, source in zip(*self.pending(), strict=True):
                target.copy_(source)

    def send(self, page: _Page) -> None:
        """Copy this page to the host, if it was not copied yet."""
        with self.lock:
            if page is self._page:
                self.copy_pending()
                self._send()

    def _send(self) -> None:
        numbers = self._block.flatten()
        self._page.source = numbers.tolist() if numbers.is_cpu else HostCopy(numbers)
        self._page = _Page(self)
        self._num_rows = 0


@dataclass(eq=False, slots=True)
class _Page:
    """One filling of the block. source: None until it is sent."""

    outbox: Outbox
    source: list[float] | HostCopy | None = None


@dataclass(eq=False, slots=True)
class Entry:
    """A number of one step. Reading it waits for the device."""

    _page: _Page
    _index: int

    @property
    def has_arrived(self) -> bool:
        source = self._page.source
        return source is not None and (isinstance(source, list) or source.has_arrived)

    def item(self) -> float:
        if self._page.source is None:
            self._page.outbox.send(self._page)
        source = self._page.source
        if isinstance(source, HostCopy):
            self._page.source = source = source.tolist()
        assert source is not None
        return source[self._index]

    def tolist(self) -> list[float]:
        return [self.item()]
