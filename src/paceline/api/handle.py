"""The handle of a run in the background."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty

import torch

from paceline.api.builder_worker import TrainedState
from paceline.run.epoch_metrics import EpochMetrics
from paceline.run.launching.background import Background

# Seconds for the current step of a run without references, or whose process exits, before it is killed.
GRACE_S = 30.0


class Handle:
    """A run in the background: iterate over it for the metrics of its epochs, `join` it for its final state.

    The run is stopped after its current step when the last reference to the handle is dropped, at the end of a
    `with handle:` block, by Ctrl-C while waiting for it, and when the interpreter exits.

    world_size: the number of workers. devices: of the workers on this machine, by rank.
    """

    def __init__(self, background: Background, world_size: int, devices: tuple[torch.device, ...]) -> None:
        self._background = background
        self.world_size = world_size
        self.devices = devices
        weakref.finalize(self, background.end, GRACE_S)

    @property
    def is_running(self) -> bool:
        return not self._background.has_ended

    def join(self, timeout: float | None = None) -> TrainedState:
        """Wait for the end and return the final state, or raise the run's error.

        An error of a started worker is raised as `WorkerError`, with the worker's traceback. After `timeout` seconds:
        `TimeoutError`, and the run continues.
        """
        with self._stopped_by_interrupt():
            if not self._background.wait(timeout):
                raise TimeoutError(f"the run continues after timeout={timeout} s: join again, or stop()")
        state: TrainedState = self._background.result()
        return state

    def next_metrics(self, timeout: float | None = None) -> EpochMetrics | None:
        """Wait for the next epoch's metrics; None when the run has ended. `join` raises its error, if any.

        After `timeout` seconds: `TimeoutError`.
        """
        with self._stopped_by_interrupt():
            try:
                message = self._background.next_message(timeout)
            except Empty:
                raise TimeoutError(f"no epoch has ended within timeout={timeout} s: the run continues") from None
        return None if message is None else EpochMetrics.from_dict(message)

    def poll_metrics(self) -> list[EpochMetrics]:
        """The metrics of the epochs that have ended since the last call. Never waits."""
        return [EpochMetrics.from_dict(message) for message in self._background.new_messages()]

    def __iter__(self) -> Iterator[EpochMetrics]:
        """The metrics of every epoch as it ends. The error of a failed run is raised after its last epoch."""
        while (metrics := self.next_metrics()) is not None:
            yield metrics
        self.join()

    def stop(self) -> None:
        """Ask all workers to end after the current step; `join` then returns the state reached. Does not wait.

        Where weights are averaged, workers end at one of the next averages.
        """
        self._background.stop()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Stop the run and wait for its end. Its error is raised unless another one is being raised."""
        self.stop()
        with self._stopped_by_interrupt():
            self._background.wait()
        if kind is None and not self._background.is_result_requested:
            self.join()

    @contextmanager
    def _stopped_by_interrupt(self) -> Iterator[None]:
        """Ctrl-C ends the run after its step, a second Ctrl-C immediately."""
        try:
            yield
        except KeyboardInterrupt:
            self.stop()
            try:
                self._background.wait()
            except KeyboardInterrupt:
                self._background.kill()
            raise
