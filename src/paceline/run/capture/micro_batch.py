"""Forward and backward of a micro-batch: eagerly, or replayed from a graph.

A shape of micro-batches is captured after it was seen a few times; rare shapes, such as the smaller batch at an epoch's
end, run eagerly. After a permanent obstacle everything runs eagerly.

A graph computes the gradients and leaves them in `.grad`, where the exchange collects them after backward. If nothing
happens between the gradients and the optimizers, a second graph covers the whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from paceline.core.errors import MisuseError
from paceline.core.events import Events
from paceline.run.capture.batches import Inputs, Opaque, leaves_of, with_own_memory
from paceline.run.capture.graphs import CaptureFailed, Graph, Graphs
from paceline.run.capture.outbox import Outbox, Outboxes
from paceline.run.capture.python_state import PythonState, RandomState, hook_of_user
from paceline.run.capture.update import CapturedUpdate, Settings
from paceline.run.capture.warm_up import WarmUp
from paceline.run.step.loop import Loop
from paceline.sync.buffers import statistics_of
from paceline.sync.gradients.direct import DirectGradients
from paceline.sync.strategy import GradientExchange

# Returns the loss of a micro-batch and the user's own numbers about it.
Function: TypeAlias = Callable[[Any], tuple[torch.Tensor, Mapping[str, Any]]]

TIMES_BEFORE_CAPTURE = 3
MAX_GRAPHS = 16
# A graph pays off after this many replays; give up after this many graphs that did not.
WORTHWHILE_REPLAYS = 50
MAX_WASTED = 3
# Give up if after this many eager micro-batches fewer were replayed.
SELDOM = 200


class PythonPass:
    """Runs every micro-batch eagerly."""

    def __init__(self, loop: Loop, function: Function) -> None:
        self._loop = loop
        self._function = function

    def __call__(self, batch: Any) -> Mapping[str, Any]:
        loss, scalars = self._function(batch)
        self._loop.backward(loss)
        return scalars


class CapturedPass:
    """Replays graphs where possible; see the module's docstring."""

    def __init__(
        self,
        loop: Loop,
        exchange: GradientExchange,
        function: Function,
        graphs: Graphs,
        update: CapturedUpdate,
        outboxes: Outboxes,
        events: Events,
        *,
        is_forced: bool,
    ) -> None:
        self._loop = loop
        self._model = loop.replica.model
        self._parameters = list(loop.replica.parameters.values())
        self._device = self._parameters[0].device
        self._exchange = exchange
        self._is_direct = isinstance(exchange, DirectGradients)
        self._function = function
        self._by_python = PythonPass(loop, function)
        self._graphs = graphs
        self._update = update
        self._outboxes = outboxes
        self._events = events
        self._is_forced = is_forced
        self._warm_up = WarmUp(graphs, is_judged=not is_forced)
        self._is_over = False
        self._times: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, _Captured] = {}
        self._whole: dict[Hashable, _Whole] = {}
        self._may_be_whole = self._is_direct
        self._state: PythonState | None = None
        self._num_wasted = self._num_by_python = self._num_replays = self._num_replays_before = 0

    def __call__(self, batch: Any) -> Mapping[str, Any]:
        self._update.is_done = False  # an error may have ended the last step
        if self._is_over or not self._loop.is_inside_epoch:
            return self._by_python(batch)
        try:
            shape, tensors = leaves_of(batch)
        except Opaque as reason:
            return self._give_up(str(reason), batch)
        captured = self._captured.get(shape)
        if captured is None or not self._is_as_captured():
            return self._run_or_capture(shape, batch, tensors)
        whole = self._whole_step(shape, captured, tensors)
        return self._replay(captured, tensors) if whole is None else self._replay_whole(whole, tensors)

    def set_parameters(self) -> None:
        """The set of trained parameters changed: drop all graphs."""
        self._forget()
        self._times.clear()
        self._parameters = list(self._loop.replica.parameters.values())

    def _run_or_capture(self, shape: Hashable, batch: Any, tensors: Sequence[torch.Tensor]) -> Mapping[str, Any]:
        if not self._warm_up.is_done:
            scalars = self._warm_up(lambda: self._by_python(batch))
            if self._warm_up.obstacle is not None:
                self._end(self._warm_up.obstacle)
            return scalars
        self._times[shape] += 1
        self._num_by_python += 1
        if self._num_by_python == SELDOM and self._num_replays < SELDOM:
            return self._give_up("too few micro-batches have the same shapes", batch)
        if self._times[shape] < TIMES_BEFORE_CAPTURE or len(self._captured) == MAX_GRAPHS:
            return self._by_python(batch)
        return self._capture(shape, batch, tensors)

    def _capture(self, shape: Hashable, batch: Any, tensors: Sequence[torch.Tensor]) -> Mapping[str, Any]:
        if obstacle := self._obstacle(tensors):
            return self._give_up(obstacle, batch)
        state, random = PythonState(self._model, self._parameters), RandomState(self._device)
        versions = self._buffer_versions()
        try:
            captured = self._record(batch)
        except CaptureFailed as failure:
            obstacle = str(failure)
        else:
            obstacle = (
                state.change()
                or ("the function draws random numbers on the host" if random.has_moved_on_host() else None)
                or ("a buffer changes that is no statistic" if self._buffer_versions() != versions else None)
                or _no_tensor(captured.outputs.scalars)
            )
        random.restore()
        if obstacle is not None:
            state.restore()
            return self._give_up(obstacle, batch)
        self._state = self._state or state
        self._captured[shape] = captured
        self._update.arm()
        self._events.emit("capture", what="micro-batch", number=len(self._captured))
        return self._replay(captured, tensors)

    def _record(self, batch: Any) -> _Captured:
        try:
            static = with_own_memory(batch)
        except RuntimeError as error:
            raise CaptureFailed(f"the batch cannot be copied: {str(error).splitlines()[0]}") from None
        graph, outputs = self._graphs.record(lambda: self._forward_backward(static))
        return _Captured(graph, outputs, static, Inputs(leaves_of(static)[1]))

    def _forward_backward(self, static: Any) -> _Outputs:
        loss, scalars = self._function(static)
        # Not loss.backward(): that would call the exchange's hooks.
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        laid_out = [_like(p, g) for p, g in zip(self._parameters, gradients, strict=True)]
        return _Outputs(loss.detach(), {name: _detached(value) for name, value in scalars.items()}, laid_out)

    def _replay(self, captured: _Captured, tensors: Sequence[torch.Tensor]) -> Mapping[str, Any]:
        self._outboxes.turn_to(None)
        captured.inputs.fill(tensors)
        captured.graph.replay()
        self._num_replays += 1
        for parameter, gradient in zip(self._parameters, captured.outputs.gradients, strict=True):
            parameter.grad = gradient
        self._loop.replayed(captured.outputs.loss)
        return captured.outputs.copied_scalars()

    def _whole_step(self, shape: Hashable, captured: _Captured, tensors: Sequence[torch.Tensor]) -> _Whole | None:
        """The graph of the whole step, if it exists or can be captured now."""
        settings = self._update.steady_settings()
        if not self._may_be_whole or settings is None or self._loop.has_gradient_hooks or not self._loop.weight:
            return None
        whole = self._whole.get(shape)
        if whole is not None and whole.settings is settings:
            return whole
        if not self._update.has_graph_for(captured.outputs.gradients):
            return None  # this shape may use parameters without optimizer state
        captured.inputs.fill(tensors)
        return self._capture_whole(shape, captured, settings)

    def _capture_whole(self, shape: Hashable, captured: _Captured, settings: Settings) -> _Whole | None:
        """Capture the step from the batch to the new weights."""

        def work() -> tuple[_Outputs, torch.Tensor | None]:
            outputs = self._forward_backward(captured.static)
            for parameter, gradient in zip(self._parameters, outputs.gradients, strict=True):
                parameter.grad = gradient
            norm = self._update.clip_and_step()
            for parameter in self._parameters:
                parameter.grad = None  # not visible outside: its memory is free for other graphs
            return outputs._replace(gradients=[]), norm

        random = RandomState(self._device)
        try:
            graph, (outputs, norm) = self._graphs.record(work)
        except CaptureFailed as failure:
            self._may_be_whole = False
            self._events.emit("capture", what="whole step", reason=str(failure))
            return None
        finally:
            random.restore()
        outbox = Outbox([outputs.loss] if norm is None else [outputs.loss, norm])
        whole = self._whole[shape] = _Whole(graph, outputs, captured.inputs, outbox, settings)
        self._events.emit("capture", what="whole step", number=len(self._whole))
        return whole

    def _replay_whole(self, whole: _Whole, tensors: Sequence[torch.Tensor]) -> Mapping[str, Any]:
        outbox = whole.outbox
        self._outboxes.turn_to(outbox)
        with outbox.lock:
            whole.inputs.fill(tensors, *outbox.pending())
            whole.graph.replay()
            loss, *norm = outbox.add()
        self._num_replays += 1
        self._update.was_replayed(norm[0] if norm else None)
        cast("DirectGradients", self._exchange).replayed(loss)
        self._loop.replayed(whole.outputs.loss)
        return whole.outputs.copied_scalars()

    def _is_as_captured(self) -> bool:
        """Whether Python would run the same code as at capture. If not, all graphs are dropped."""
        assert self._state is not None
        change = self._state.change()
        if change is None:
            return True
        if self._num_replays - self._num_replays_before < WORTHWHILE_REPLAYS:
            self._num_wasted += 1
        self._num_replays_before = self._num_replays
        self._forget()
        self._times.clear()
        self._events.emit("capture", what="micro-batch", reason=change)
        if self._num_wasted == MAX_WASTED:
            self._end(f"{change}: the model keeps changing between captures")
        return False

    def _obstacle(self, tensors: Sequence[torch.Tensor]) -> str | None:
        if any(tensor.device != self._device for tensor in tensors):
            return f"the batch has a tensor that is not on {self._device}"
        if any(tensor.requires_grad for tensor in tensors):
            return "the batch has a tensor that requires a gradient"
        if self._exchange.has_gradient():
            return "there are gradients before the function is called"
        return hook_of_user(self._model, self._loop.replica.parameters, num_own=self._exchange.hooks_per_parameter)

    def _buffer_versions(self) -> list[int]:
        """Versions of buffers without a rule, by which an exchange detects changes. A replay does not count them."""
        if self._is_direct or not isinstance(self._model, torch.nn.Module):
            return []
        known = {id(tensor) for tensor in statistics_of(self._model)}
        return [buffer._version for buffer in self._model.buffers() if id(buffer) not in known]

    def _forget(self) -> None:
        self._outboxes.turn_to(None)
        self._captured, self._whole, self._state = {}, {}, None
        self._update.disarm()

    def _give_up(self, reason: str, batch: Any) -> Mapping[str, Any]:
        self._end(reason)
        return self._by_python(batch)

    def _end(self, reason: str) -> None:
        if self._is_forced:
            raise MisuseError(
                f'capture="on", but a micro-batch cannot be captured: {reason}. Change that, or choose capture="auto"'
            )
        self._is_over = True
        self._forget()
        self._events.emit("capture", what="micro-batch", reason=reason)


class _Outputs(NamedTuple):
    """The outputs of a graph, at fixed addresses."""

    loss: torch.Tensor
    scalars: dict[str, Any]
    gradients: list[torch.Tensor | None]

    def copied_scalars(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.scalars.items()} if self.scalars else {}


class _Captured(NamedTuple):
    """Forward and backward, with their input."""

    graph: Graph
    outputs: _Outputs
    static: Any
    inputs: Inputs


class _Whole(NamedTuple):
    """Forward, backward and the optimizers' step, valid while the optimizers have these settings.

    outbox: receives the loss, and the gradient's norm if it is computed.
    """

    graph: Graph
    outputs: _Outputs
    inputs: Inputs
    outbox: Outbox
    settings: Settings


def _like(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient in the memory layout of its parameter, as backward leaves it."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _no_tensor(scalars: Mapping[str, Any]) -> str | None:
    for name, value in scalars.items():
        if not isinstance(value, torch.Tensor):
            return f"{name!r} is a Python number: return it as a tensor"
    return None
