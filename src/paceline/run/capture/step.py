"""`step_with`: steps that call one function, eagerly or by CUDA graphs."""

from __future__ import annotations

from typing import Any

from paceline.core.events import Events
from paceline.core.world import World
from paceline.run.capture.graphs import CudaGraphs, Graphs
from paceline.run.capture.micro_batch import CapturedPass, Function, PythonPass
from paceline.run.capture.outbox import Outboxes
from paceline.run.capture.update import CapturedUpdate
from paceline.run.config import RunConfig
from paceline.run.step.loop import Loop, StepRecord
from paceline.sync.averaging.strategy import Averaging
from paceline.sync.strategy import GradientExchange


class Stepping:
    """Runs a loop's micro-batches with functions of the user. graphs: the device's, or the reason for having none."""

    def __init__(
        self, loop: Loop, exchange: GradientExchange, events: Events, graphs: Graphs | str, config: RunConfig
    ) -> None:
        self._loop = loop
        self._exchange = exchange
        self._events = events
        self._graphs = graphs
        self._is_forced = config.runtime.capture == "on"
        self._device = next(iter(loop.replica.parameters.values())).device
        if not isinstance(graphs, str):
            self._update = CapturedUpdate(loop.replica, config.max_grad_norm, graphs, events, is_forced=self._is_forced)
            self._outboxes = Outboxes()
            loop.update = self._update
            loop.on_parameters(self._update.set_parameters)

    def with_function(self, function: Function) -> StepFunction:
        if isinstance(self._graphs, str):
            if self._device.type == "cuda":  # other devices have no graphs
                self._events.emit("capture", what="micro-batch", reason=self._graphs)
            return StepFunction(self._loop, PythonPass(self._loop, function))
        captured = CapturedPass(
            self._loop,
            self._exchange,
            function,
            self._graphs,
            self._update,
            self._outboxes,
            self._events,
            is_forced=self._is_forced,
        )
        self._loop.on_parameters(captured.set_parameters)
        return StepFunction(self._loop, captured)


class StepFunction:
    """Call it with each micro-batch. Returns the record of a completed step, else None."""

    def __init__(self, loop: Loop, run_micro_batch: PythonPass | CapturedPass) -> None:
        self._loop = loop
        # Forward and backward only; returns the function's numbers.
        self.run_micro_batch = run_micro_batch

    def __call__(self, batch: Any) -> StepRecord | None:
        self.run_micro_batch(batch)
        return self._loop.step()


def graphs_for(config: RunConfig, world: World) -> Graphs | str:
    """The device's graphs, or the reason why nothing can be captured."""
    obstacle = _obstacle(config, world)
    if obstacle is None:
        return CudaGraphs(world.device)
    if config.runtime.capture == "on":
        raise ValueError(f'capture="on", but nothing can be captured: {obstacle}; choose capture="auto" or "off"')
    return obstacle


def _obstacle(config: RunConfig, world: World) -> str | None:
    if config.runtime.capture == "off":
        return 'capture="off"'
    if world.device.type != "cuda":
        return f"{world.device} is not a CUDA device"
    if config.precision == "fp16":
        return "with fp16 the host decides after backward whether a step is taken"
    if isinstance(config.strategy, Averaging) and world.size > 1:
        return "Averaging exchanges weights, not gradients"
    return None
