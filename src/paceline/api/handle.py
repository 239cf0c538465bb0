"""The handle of a run that goes on in the background."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty
from types import TracebackType

import torch

from paceline.api.builder_worker import TrainedState
from paceline.run.epoch_metrics import EpochMetrics
from paceline.run.launching.background import Background

# For a run that nobody holds any more, or whose process exits: to finish its step before it is killed.
GRACE_S = 30.0


class Handle:
    """A run in the background: iterate for its epochs' metrics as they come, `join` for what it has come to.

    It is stopped when its last reference goes, when a `with handle:` block is left, by Ctrl-C in a wait for it, and
    when the interpreter exits: after its current step, and nothing of it is left.
    """

    def __init__(self, background: Background, world_size: int, devices: tuple[torch.device, ...]) -> None:
        self._background = background
        self._world_size = world_size
        self._devices = devices
        weakref.finalize(self, background.end, GRACE_S)

    @property
    def world_size(self) -> int:
        """How many workers train."""
        return self._world_size

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """What the workers on this machine train on, by rank."""
        return self._devices

    @property
    def is_running(self) -> bool:
        return not self._background.has_ended

    def join(self, timeout: float | None = None) -> TrainedState:
        """Wait for the end and return what the run has come to; its error is raised here.

        An error in this process comes as it is, one of a worker that was started as `WorkerError`, with the worker's
        traceback. After `timeout` seconds: `TimeoutError`, and the run goes on.
        """
        with self._stopped_by_interrupt():
            if not self._background.wait(timeout):
                raise TimeoutError(f"the run is not over after timeout={timeout} s: it goes on; join again, or stop()")
        state: TrainedState = self._background.result()
        return state

    def next_metrics(self, timeout: float | None = None) -> EpochMetrics | None:
        """The next epoch's metrics, waited for; None when the run is over. `join` tells how it ended.

        After `timeout` seconds: `TimeoutError`.
        """
        with self._stopped_by_interrupt():
            try:
                message = self._background.next_message(timeout)
            except Empty:
                raise TimeoutError(f"no epoch has ended within timeout={timeout} s: the run goes on") from None
        return None if message is None else EpochMetrics.from_dict(message)

    def poll_metrics(self) -> list[EpochMetrics]:
        """The metrics of the epochs that have ended since they were last asked for. Never waits."""
        return [EpochMetrics.from_dict(message) for message in self._background.new_messages()]

    def __iter__(self) -> Iterator[EpochMetrics]:
        """Every epoch's metrics as it ends. The error of a run that failed is raised after its last epoch."""
        while (metrics := self.next_metrics()) is not None:
            yield metrics
        self.join()

    def stop(self) -> None:
        """Have all workers end after the current step; `join` then returns the state reached. Returns at once.

        Where weights are averaged, workers end at one of the next averages.
        """
        self._background.stop()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the run and wait for its end; its own error is raised if no other is on its way."""
        self.stop()
        with self._stopped_by_interrupt():
            self._background.wait()
        if kind is None and not self._background.is_told:
            self.join()

    @contextmanager
    def _stopped_by_interrupt(self) -> Iterator[None]:
        """Ctrl-C ends the run after its step, a second one at once."""
        try:
            yield
        except KeyboardInterrupt:
            self.stop()
            try:
                self._background.wait()
            except KeyboardInterrupt:
                self._background.kill()
            raise
