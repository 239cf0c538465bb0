"""The losses of a run's steps, without a device synchronization in every step."""

from __future__ import annotations

from typing import Protocol

READ_INTERVAL = 256


class HasLoss(Protocol):
    """A step's numbers. Reading `loss` waits for the device."""

    @property
    def loss(self) -> float: ...


class LossHistory:
    """Collects the losses of steps. They stay on the device and are read `READ_INTERVAL` at a time."""

    def __init__(self) -> None:
        self._read: list[float] = []
        self._unread: list[HasLoss] = []

    def add(self, step: HasLoss) -> None:
        self._unread.append(step)
        if len(self._unread) == READ_INTERVAL:
            self.read()

    def read(self) -> list[float]:
        self._read.extend(step.loss for step in self._unread)
        self._unread.clear()
        return self._read
