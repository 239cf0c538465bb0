"""Runs a function on each micro-batch, eagerly or by replaying CUDA graphs.

A shape of micro-batches is captured after it was seen a few times; rare shapes, such as the smaller batch at an epoch's
end, run eagerly. After a permanent obstacle everything runs eagerly.

A graph computes the gradients and leaves them in `.grad`, where the exchange collects them after backward. If nothing
happens between the gradients and the optimizers, a second graph covers the whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from paceline.core.events import Events
from paceline.run.capture.graphs import CaptureFailed, CudaGraphs, GraphRecorder, Seconds
from paceline.run.capture.inputs import Inputs, leaves_of
from paceline.run.capture.model_snapshot import ModelSnapshot, hook_of_user
from paceline.run.capture.outbox import Outbox
from paceline.run.capture.update import CapturedUpdate, OptimizerSnapshot
from paceline.run.config import RunConfig
from paceline.run.step.loop import Loop
from paceline.run.step.record import StepRecord
from paceline.sync.buffers import statistics_of
from paceline.sync.gradients.direct import DirectGradients
from paceline.sync.strategy import GradientExchange

# Returns the loss of a micro-batch and the user's own numbers about it.
Function: TypeAlias = Callable[[Any], tuple[torch.Tensor, Mapping[str, Any]]]

# The first micro-batches do one-time work. The next are timed, to see whether capture would be faster.
NUM_UNTIMED = 3
NUM_TIMED = 3
# Ratio of device time to launch time up to which the device waits for the host. Above it a graph gains nothing.
LAUNCH_BOUND = 1.25
TIMES_BEFORE_CAPTURE = 3
MAX_GRAPHS = 16
# Give up if this many micro-batches ran eagerly and fewer were replayed. Capturing again counts as COST_OF_CHANGE.
MAX_EAGER = 200
COST_OF_CHANGE = 50


class Stepping:
    """Runs a loop's micro-batches with the user's functions. graphs: the device's, or the reason why there are none."""

    def __init__(
        self, loop: Loop, exchange: GradientExchange, events: Events, graphs: CudaGraphs | str, config: RunConfig
    ) -> None:
        self._loop = loop
        self._exchange = exchange
        self._events = events
        self._device = next(iter(loop.replica.parameters.values())).device
        self._reason = graphs if isinstance(graphs, str) else None
        if not isinstance(graphs, str):
            is_forced = config.runtime.capture == "on"
            recorder = GraphRecorder(graphs, self._device, events, is_forced=is_forced)
            self._update = CapturedUpdate(loop.replica, config.max_grad_norm, recorder, exact=config.exact)
            if loop.replica.pieces is None:  # else each worker updates its own, and graphs have micro-batches only
                loop.update = self._update

    def with_function(self, function: Function) -> StepFunction:
        if self._reason is None:
            return CapturedStepFunction(self._loop, function, self._exchange, self._update)
        if self._device.type == "cuda":  # other devices have no graphs
            self._events.emit("capture", what="micro-batch", reason=self._reason)
        return StepFunction(self._loop, function)


class StepFunction:
    """Call it with each micro-batch. Returns the record of a completed step, else None."""

    def __init__(self, loop: Loop, function: Function) -> None:
        self._loop = loop
        self._function = function

    def __call__(self, batch: Any) -> StepRecord | None:
        self.run_micro_batch(batch)
        return self._loop.step()

    def run_micro_batch(self, batch: Any) -> Mapping[str, Any]:
        """Forward and backward only; returns the function's numbers."""
        loss, scalars = self._function(batch)
        self._loop.backward(loss)
        return scalars


class CapturedStepFunction(StepFunction):
    """Replays graphs where possible; see the module's docstring."""

    def __init__(self, loop: Loop, function: Function, exchange: GradientExchange, update: CapturedUpdate) -> None:
        super().__init__(loop, function)
        self._replica = loop.replica
        self._exchange = exchange
        self._update = update
        self._recorder = update.recorder
        self._has_given_up = False
        self._may_be_whole = isinstance(exchange, DirectGradients)
        self._num_warm_up = 0
        self._timed: list[Seconds] = []
        self._times: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, _Captured] = {}
        self._snapshot: ModelSnapshot | None = None
        self._num_eager = self._num_replays = 0
        loop.hooks.on_parameters(self._forget)

    def run_micro_batch(self, batch: Any) -> Mapping[str, Any]:
        self._update.is_done = False  # an error may have ended the last step
        if self._has_given_up or not self._loop.is_inside_epoch:
            return super().run_micro_batch(batch)
        try:
            shape, tensors = leaves_of(batch)
            if self._num_warm_up < NUM_UNTIMED + (0 if self._recorder.is_forced else NUM_TIMED):
                return self._warm_up(batch)
            captured = self._find_or_capture(shape, tensors, batch)
        except CaptureFailed as failure:
            reason = str(failure)
        else:
            return super().run_micro_batch(batch) if captured is None else self._replay(captured, tensors)
        self._give_up(reason)
        return super().run_micro_batch(batch)

    def _warm_up(self, batch: Any) -> Mapping[str, Any]:
        self._num_warm_up += 1
        if self._num_warm_up <= NUM_UNTIMED:
            return super().run_micro_batch(batch)
        scalars, seconds = self._recorder.timed(partial(super().run_micro_batch, batch))
        self._timed.append(seconds)
        if len(self._timed) == NUM_TIMED:
            host_s, device_s = sorted(self._timed, key=lambda s: s.device / s.host)[NUM_TIMED // 2]
            if device_s > LAUNCH_BOUND * host_s:
                self._give_up(
                    f"the device needs {1e3 * device_s:.2f} ms for a micro-batch that is launched in "
                    f"{1e3 * host_s:.2f} ms, so it does not wait for the host"
                )
        return scalars

    def _find_or_capture(self, shape: Hashable, tensors: Sequence[torch.Tensor], batch: Any) -> _Captured | None:
        """The graph of this shape; None if the micro-batch must run eagerly.

        If Python would no longer run the same code as at capture, all graphs are dropped.
        """
        captured = self._captured.get(shape)
        if captured is not None and self._snapshot is not None:
            change = self._snapshot.change()
            if change is None:
                return captured
            self._forget()
            self._num_eager += COST_OF_CHANGE
            self._recorder.report("micro-batch", change)
        self._times[shape] += 1
        self._num_eager += 1
        if self._num_eager > max(self._num_replays, MAX_EAGER):
            raise CaptureFailed("too few micro-batches can be replayed: shapes or the model change too often")
        if self._times[shape] < TIMES_BEFORE_CAPTURE or len(self._captured) == MAX_GRAPHS:
            return None
        return self._capture(shape, tensors, batch)

    def _capture(self, shape: Hashable, tensors: Sequence[torch.Tensor], batch: Any) -> _Captured:
        if obstacle := self._obstacle(tensors):
            raise CaptureFailed(obstacle)
        snapshot = ModelSnapshot(self._replica.model, self._replica.parameters.values())
        versions = self._buffer_versions()

        def side_effect(outputs: _Outputs) -> str | None:
            if change := snapshot.change():
                return change
            if self._buffer_versions() != versions:
                return "a buffer changes that is not a statistic"
            numbers = [name for name, value in outputs.scalars.items() if not isinstance(value, torch.Tensor)]
            return f"{numbers[0]!r} is a Python number: return it as a tensor" if numbers else None

        inputs = Inputs(batch)
        work = partial(self._forward_backward, inputs.batch)
        try:
            graph, outputs = self._recorder.record("micro-batch", work, side_effect)
        except CaptureFailed:
            snapshot.restore()
            raise
        self._snapshot = self._snapshot or snapshot
        captured = self._captured[shape] = _Captured(inputs, graph, outputs)
        return captured

    def _forward_backward(self, batch: Any) -> _Outputs:
        loss, scalars = self._function(batch)
        parameters = list(self._replica.parameters.values())
        # Not loss.backward(): that would call the exchange's hooks.
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        detached = {name: v.detach() if isinstance(v, torch.Tensor) else v for name, v in scalars.items()}
        return _Outputs(loss.detach(), detached, [_like(p, g) for p, g in zip(parameters, gradients, strict=True)])

    def _whole_step(self, batch: Any) -> _Outputs:
        """From the batch to the new weights."""
        outputs = self._forward_backward(batch)
        self._set_gradients(outputs.gradients)
        norm = self._update.clip_and_step()
        for parameter in self._replica.parameters.values():
            parameter.grad = None  # not visible outside: its memory is free for other graphs
        return outputs._replace(gradients=[], norm=norm)

    def _find_or_capture_whole(self, captured: _Captured, tensors: Sequence[torch.Tensor]) -> _WholeStep | None:
        """The graph of the whole step, if it exists or can be captured now."""
        if not self._may_be_whole or self._loop.hooks.of_gradients or not self._loop.open.weight:
            return None
        snapshot = self._update.unchanged_snapshot()
        if snapshot is None:
            return None
        if captured.whole is not None and captured.whole.snapshot is snapshot:
            return captured.whole
        if not self._update.has_graph_for(captured.outputs.gradients):
            return None  # this shape may use parameters without optimizer state
        captured.inputs.fill(tensors)
        work = partial(self._whole_step, captured.inputs.batch)
        try:
            graph, outputs = self._recorder.record("whole step", work, lambda _: None)
        except CaptureFailed as failure:
            self._may_be_whole = False
            self._recorder.report("whole step", str(failure))
            return None
        outbox = Outbox([outputs.loss] if outputs.norm is None else [outputs.loss, outputs.norm])
        captured.whole = _WholeStep(graph, outputs, outbox, snapshot)
        return captured.whole

    def _replay(self, captured: _Captured, tensors: Sequence[torch.Tensor]) -> Mapping[str, Any]:
        self._num_replays += 1
        self._update.is_enabled = True
        whole = self._find_or_capture_whole(captured, tensors)
        if whole is None:
            outputs = captured.outputs
            self._recorder.before_replay(None)
            captured.inputs.fill(tensors)
            captured.graph.replay()
            self._set_gradients(outputs.gradients)
        else:
            outputs, outbox = whole.outputs, whole.outbox
            self._recorder.before_replay(outbox)
            with outbox.lock:
                captured.inputs.fill(tensors, *outbox.pending())
                whole.graph.replay()
                loss, *norm = outbox.add()
            self._update.was_replayed(norm[0] if norm else None)
            assert isinstance(self._exchange, DirectGradients)
            self._exchange.replayed(loss)
        self._loop.open.loss = outputs.loss
        return {name: value.clone() for name, value in outputs.scalars.items()}

    def _set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._replica.parameters.values(), gradients, strict=True):
            parameter.grad = gradient

    def _obstacle(self, tensors: Sequence[torch.Tensor]) -> str | None:
        device = self._recorder.device
        if any(tensor.device != device or tensor.requires_grad for tensor in tensors):
            return f"the batch has a tensor that is not on {device} or requires a gradient"
        if self._exchange.has_gradient():
            return "there are gradients before the function is called"
        return hook_of_user(self._replica.model, self._replica.parameters, num_own=self._exchange.hooks_per_parameter)

    def _buffer_versions(self) -> list[int]:
        """Versions of buffers without a rule, by which an exchange detects changes. A replay does not count them."""
        model = self._replica.model
        if isinstance(self._exchange, DirectGradients) or not isinstance(model, torch.nn.Module):
            return []
        known = {id(tensor) for tensor in statistics_of(model)}
        return [buffer._version for buffer in model.buffers() if id(buffer) not in known]

    def _forget(self) -> None:
        """Drop all graphs."""
        self._recorder.before_replay(None)
        self._captured, self._snapshot = {}, None
        self._times.clear()
        self._update.reset()

    def _give_up(self, reason: str) -> None:
        self._has_given_up = True
        self._forget()
        self._recorder.give_up("micro-batch", reason)


class _Outputs(NamedTuple):
    """The outputs of a graph, at fixed addresses. norm: of the gradient, if the graph has computed it."""

    loss: torch.Tensor
    scalars: dict[str, Any]
    gradients: list[torch.Tensor | None]
    norm: torch.Tensor | None = None


@dataclass
class _Captured:
    """Forward and backward of one shape of micro-batches, and the graph of the whole step, if there is one."""

    inputs: Inputs
    graph: torch.cuda.CUDAGraph
    outputs: _Outputs
    whole: _WholeStep | None = None


class _WholeStep(NamedTuple):
    """Forward, backward and the optimizers' step, valid while the optimizers are as in the snapshot.

    outbox: receives the loss, and the gradient's norm if it is computed.
    """

    graph: torch.cuda.CUDAGraph
    outputs: _Outputs
    outbox: Outbox
    snapshot: OptimizerSnapshot


def _like(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient in the memory layout of its parameter, as backward leaves it."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
