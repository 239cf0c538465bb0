"""The optimizers' step, replayed from a graph while their settings and the addresses of gradients stay the same."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from paceline.core.errors import MisuseError
from paceline.core.events import Events
from paceline.run.capture.graphs import CaptureFailed, Graph, Graphs
from paceline.run.step.replica import Number, Replica, Update

STEPS_BEFORE_CAPTURE = 3
# Report the reason after this many steps without capture; give up after this many captures.
STEPS_BEFORE_REASON = 50
MAX_CAPTURES = 20
MAX_GRAPHS = 4

_Places: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class CapturedUpdate(Update):
    """An `Update` that replays a graph once it is armed and steps repeat."""

    def __init__(
        self, replica: Replica, max_norm: float | None, graphs: Graphs, events: Events, *, is_forced: bool
    ) -> None:
        super().__init__(replica, max_norm)
        self._graphs = graphs
        self._events = events
        self._is_forced = is_forced
        self._is_armed = self._is_over = self.is_done = False
        self._parameters = list(replica.parameters.values())
        self._settings: Settings | None = None
        self._times: Counter[_Places] = Counter()
        self._captured: dict[_Places, tuple[Graph, torch.Tensor | None]] = {}
        self._norm: Number | None = None
        self._num_captures = self._num_changes = 0

    def set_parameters(self) -> None:
        """The set of trained parameters changed."""
        self.disarm()
        self._parameters = list(self._replica.parameters.values())

    @property
    def can_be_voided(self) -> bool:
        return not self._is_armed and super().can_be_voided

    def arm(self) -> None:
        """Micro-batches are replayed from now on: their gradients have fixed addresses."""
        if self._is_armed or self._is_over:
            return
        self._is_armed = True
        if obstacle := _obstacle(self._replica.optimizers, num_own_hooks=1):
            self._end(obstacle)

    def disarm(self) -> None:
        """Micro-batches are no longer replayed: their gradients have no fixed addresses."""
        self._is_armed = False
        self._forget()

    def steady_settings(self) -> Settings | None:
        """The settings of the recorded graph, if they are unchanged."""
        if not self._captured or not self._is_armed or self._settings is None or self._settings.change() is not None:
            return None
        return self._settings

    def has_graph_for(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether there is a graph for gradients at these addresses."""
        return self._places(gradients) in self._captured

    def clip_and_step(self) -> torch.Tensor | None:
        """The whole update, for recording."""
        with _capturable(self._replica.optimizers):
            norm = self._clip()
            super().step()
        return norm

    def was_replayed(self, norm: Number | None) -> None:
        """A graph has run this step's update. norm: of the gradient."""
        self.is_done = True
        self._norm = norm

    def clip(self) -> Number | None:
        if self._max_norm is None:
            return None
        if self.is_done:
            return self._norm
        captured = self._graph_of_this_step()
        if captured is None:
            return super().clip()
        graph, norm = captured
        graph.replay()
        assert norm is not None
        self.was_replayed(norm.clone())  # the next step overwrites it
        return self._norm

    def step(self) -> None:
        if self.is_done:
            self.is_done = False
            return
        captured = self._graph_of_this_step() if self._max_norm is None else None
        if captured is None:
            super().step()
        else:
            captured[0].replay()

    def _graph_of_this_step(self) -> tuple[Graph, torch.Tensor | None] | None:
        if not self._is_armed or self._is_over:
            return None
        change = None if self._settings is None else self._settings.change()
        if self._settings is None or change is not None:
            self._forget()
            self._settings = Settings(self._replica.optimizers)
            self._num_changes += 1
            if self._num_changes == STEPS_BEFORE_REASON:
                self._events.emit("capture", what="optimizer", reason=f"{change} in nearly every step")
        places = self._places([parameter.grad for parameter in self._parameters])
        captured = self._captured.get(places)
        if captured is not None or len(self._captured) == MAX_GRAPHS:
            return captured
        self._times[places] += 1
        return self._capture(places) if self._times[places] > STEPS_BEFORE_CAPTURE else None

    def _capture(self, places: _Places) -> tuple[Graph, torch.Tensor | None] | None:
        assert self._settings is not None
        if self._num_captures == MAX_CAPTURES:
            self._end(f"its settings changed after each of {MAX_CAPTURES} captures")
            return None
        try:
            captured = self._graphs.record(self.clip_and_step)
        except CaptureFailed as failure:
            self._end(str(failure))
            return None
        if (change := self._settings.change()) is not None:
            self._end(change)
            return None
        self._num_changes = 0
        self._num_captures += 1
        self._captured[places] = captured
        self._events.emit("capture", what="optimizer", number=self._num_captures)
        return captured

    def _places(self, gradients: Sequence[torch.Tensor | None]) -> _Places:
        """The addresses of parameters and gradients."""
        own = tuple([parameter.data_ptr() for parameter in self._parameters])
        return own, tuple([0 if gradient is None else gradient.data_ptr() for gradient in gradients])

    def _forget(self) -> None:
        self._settings = None
        self._captured = {}
        self._times.clear()

    def _end(self, reason: str) -> None:
        self._is_over = True
        self._forget()
        if self._is_forced:
            raise MisuseError(
                f'capture="on", but the optimizer cannot be captured: {reason}. Change that, or choose capture="auto"'
            )
        self._events.emit("capture", what="optimizer", reason=reason)


class Settings:
    """A snapshot of optimizer settings and state, which a replayed step requires to be unchanged."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._groups = [(group, dict(group), len(group["params"])) for o in optimizers for group in o.param_groups]
        self._states = [(o, o.state, list(o.state.values())) for o in optimizers]
        # References keep the memory that a graph writes to from being reused.
        self._held = [
            (values, len(values), name, value)
            for o in optimizers
            for values in o.state.values()
            for name, value in values.items()
        ]

    def change(self) -> str | None:
        """What has changed; None if nothing has."""
        for group, then, num_parameters in self._groups:
            if group != then or len(group["params"]) != num_parameters:
                changed = [key for key in group if group[key] != then.get(key)] or ["params"]
                return f"{', '.join(map(repr, changed))} of its settings changed"
        for optimizer, state, of_parameters in self._states:
            if optimizer.state is not state or not _are_same(state.values(), of_parameters):
                return "its state was replaced"
        for values, num_values, name, value in self._held:
            if values.get(name) is not value or len(values) != num_values:
                return "its state was replaced"
        return None


def _are_same(one: Collection[Any], other: Collection[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _obstacle(optimizers: Sequence[torch.optim.Optimizer], num_own_hooks: int = 0) -> str | None:
    for optimizer in optimizers:
        name = type(optimizer).__name__
        hooks: Any = optimizer
        if len(hooks._optimizer_step_pre_hooks) > num_own_hooks or hooks._optimizer_step_post_hooks:
            return f"{name} has step hooks, which a replay does not call"
        for group in optimizer.param_groups:
            if type(optimizer).__module__.partition(".")[0] != "torch" or not _keeps_its_steps_on_device(group, name):
                return f"{name} computes on the host: choose SGD, or Adam or AdamW with fused=True"
            if name == "SGD" and isinstance(group["lr"], torch.Tensor):
                return "SGD reads a learning rate that is a tensor on the host: use a number"
    return None


def _keeps_its_steps_on_device(group: dict[str, Any], name: str) -> bool:
    return name == "SGD" or bool(group.get("capturable") or (name in ("Adam", "AdamW") and group.get("fused")))


@contextmanager
def _capturable(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Fused optimizers compute the same either way, but can be captured only with capturable=True."""
    fused = [group for o in optimizers for group in o.param_groups if group.get("fused") and "capturable" in group]
    before = [group["capturable"] for group in fused]
    for group in fused:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, was_capturable in zip(fused, before, strict=True):
            group["capturable"] = was_capturable
