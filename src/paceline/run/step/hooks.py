"""Functions of the user that all workers call together: after steps and epochs, and with the mean gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import torch

from paceline.observe.timeline.recorder import Recorder
from paceline.run.step.record import StepRecord


class Hooks:
    """The registered hooks, and a queue of those that are due.

    A loss of a worker may interrupt a hook. `run_due` continues with the next one then. prepare: called before each.
    """

    def __init__(self, prepare: Callable[[], None], timeline: Recorder) -> None:
        self._prepare = prepare
        self._timeline = timeline
        self.is_running = False
        self.of_steps: list[tuple[int, Callable[[StepRecord], object]]] = []
        self.of_epochs: list[tuple[int, Callable[[int], object]]] = []
        self.of_gradients: list[Callable[[Mapping[str, torch.Tensor]], object]] = []
        self.of_parameters: list[Callable[[], object]] = []
        self.due: deque[Callable[[], None]] = deque()

    def every(self, steps: int, hook: Callable[[StepRecord], object]) -> None:
        """Call `hook(record)` after every `steps` steps."""
        if steps < 1:
            raise ValueError(f"every({steps}, ...): choose at least 1 step")
        self.of_steps.append((steps, hook))

    def every_epoch(self, epochs: int, hook: Callable[[int], object]) -> None:
        """Call `hook(number)` at the end of every `epochs` epochs."""
        if epochs < 1:
            raise ValueError(f"every_epoch({epochs}, ...): choose at least 1 epoch")
        self.of_epochs.append((epochs, hook))

    def on_gradients(self, hook: Callable[[Mapping[str, torch.Tensor]], object]) -> None:
        """Call `hook(parameters)` in every step, when gradients are the mean and not clipped yet."""
        self.of_gradients.append(hook)

    def on_parameters(self, hook: Callable[[], object]) -> None:
        """Call `hook()` when the set of trained parameters has changed."""
        self.of_parameters.append(hook)

    def queue_step(self, record: StepRecord) -> None:
        self.due.extend(partial(self.call, hook, record) for steps, hook in self.of_steps if record.step % steps == 0)

    def queue_epoch(self, number: int) -> None:
        due = (hook for epochs, hook in self.of_epochs if (number + 1) % epochs == 0)
        self.due.extend(partial(self.call, hook, number) for hook in due)

    def run_due(self) -> None:
        while self.due:
            self.due.popleft()()

    def call(self, hook: Callable[[Any], object], subject: Any) -> None:
        self._prepare()
        self.is_running = True
        begin = perf_counter()
        try:
            hook(subject)
        finally:
            self.is_running = False
            self._timeline.took("hook", begin, function=getattr(hook, "__qualname__", type(hook).__name__))
