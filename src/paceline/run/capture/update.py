"""The optimizers' step, replayed from a graph while their settings and the addresses of gradients stay the same."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from paceline.run.capture.graphs import CaptureFailed, GraphRecorder
from paceline.run.step.replica import Number, Replica, Update

STEPS_BEFORE_CAPTURE = 3
# Report the reason after this many steps without capture; give up after this many captures.
STEPS_BEFORE_REASON = 50
MAX_CAPTURES = 20
MAX_GRAPHS = 4

# Of parameters and gradients.
_Addresses: TypeAlias = tuple[int, ...]


class CapturedUpdate(Update):
    """An `Update` that replays a graph while it is enabled and steps repeat."""

    def __init__(
        self, replica: Replica, max_norm: float | None, recorder: GraphRecorder, *, exact: bool = False
    ) -> None:
        super().__init__(replica, max_norm, exact=exact)
        self.recorder = recorder
        self.is_enabled = False  # while micro-batches are replayed, which leave their gradients at fixed addresses
        self.is_done = False  # a graph has run this step's update
        self._has_given_up = False
        self._norm: Number | None = None
        self._num_captures = self._num_changes = 0
        self._snapshot: OptimizerSnapshot | None = None
        self._captured: dict[_Addresses, tuple[torch.cuda.CUDAGraph, torch.Tensor | None]] = {}
        self._times: Counter[_Addresses] = Counter()

    @property
    def can_be_voided(self) -> bool:
        return not self.is_enabled and super().can_be_voided

    def reset(self) -> None:
        """Micro-batches are no longer replayed: their gradients have no fixed addresses. Drop all graphs."""
        self.is_enabled = False
        self._snapshot = None
        self._captured.clear()
        self._times.clear()

    def unchanged_snapshot(self) -> OptimizerSnapshot | None:
        """The optimizers' state at capture, if there is a graph and the state is unchanged."""
        if not self._captured or self._snapshot is None or self._snapshot.change() is not None:
            return None
        return self._snapshot

    def has_graph_for(self, gradients: Iterable[torch.Tensor | None]) -> bool:
        """Whether there is a graph for gradients at these addresses."""
        return self._addresses(gradients) in self._captured

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
        if not self.is_done:
            self._replay()
        return self._norm if self.is_done else super().clip()

    def step(self) -> None:
        if not self.is_done and self._max_norm is None:  # else `clip` has tried to replay
            self._replay()
        if not self.is_done:
            super().step()
        self.is_done = False

    def _replay(self) -> None:
        """Replay the graph of this step, if there is one or it can be captured now."""
        if not self.is_enabled or self._has_given_up:
            return
        change = None if self._snapshot is None else self._snapshot.change()
        if self._snapshot is None and (obstacle := optimizer_obstacle(self._replica.optimizers, num_own_hooks=1)):
            self._give_up(obstacle)
            return
        if self._snapshot is None or change is not None:
            self._captured.clear()
            self._times.clear()
            self._snapshot = OptimizerSnapshot(self._replica.optimizers)
            self._num_changes += 1
            if self._num_changes == STEPS_BEFORE_REASON:
                self.recorder.report("optimizer", f"{change} in nearly every step")
        addresses = self._addresses(parameter.grad for parameter in self._replica.parameters.values())
        if addresses not in self._captured and len(self._captured) < MAX_GRAPHS:
            self._times[addresses] += 1
            if self._times[addresses] > STEPS_BEFORE_CAPTURE:
                self._capture(addresses, self._snapshot)
        if addresses in self._captured:
            graph, norm = self._captured[addresses]
            self.recorder.before_replay(None)
            graph.replay()
            self.was_replayed(None if norm is None else norm.clone())  # the next step overwrites it

    def _capture(self, addresses: _Addresses, snapshot: OptimizerSnapshot) -> None:
        try:
            if self._num_captures == MAX_CAPTURES:
                raise CaptureFailed(f"its settings changed after each of {MAX_CAPTURES} captures")
            captured = self.recorder.record("optimizer", self.clip_and_step, lambda _: snapshot.change())
        except CaptureFailed as failure:
            reason = str(failure)
        else:
            self._captured[addresses] = captured
            self._num_captures += 1
            self._num_changes = 0
            return
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self._has_given_up = True
        self._captured.clear()
        self.recorder.give_up("optimizer", reason)

    def _addresses(self, gradients: Iterable[torch.Tensor | None]) -> _Addresses:
        own = [parameter.data_ptr() for parameter in self._replica.parameters.values()]
        return (*own, *[0 if gradient is None else gradient.data_ptr() for gradient in gradients])


class OptimizerSnapshot:
    """A snapshot of optimizer settings and state, which a replayed step requires to be unchanged."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._groups = [(group, dict(group), len(group["params"])) for o in optimizers for group in o.param_groups]
        # References keep the memory that a graph writes to from being reused.
        self._state = self._current_state()

    def change(self) -> str | None:
        """What has changed; None if nothing has."""
        for group, then, num_parameters in self._groups:
            if group != then or len(group["params"]) != num_parameters:
                changed = [key for key in group if group[key] != then.get(key)] or ["params"]
                return f"{', '.join(map(repr, changed))} of its settings changed"
        state = self._current_state()
        if len(state) != len(self._state) or not all(map(operator.is_, state, self._state)):
            return "its state was replaced"
        return None

    def _current_state(self) -> list[object]:
        """The dicts of state, and their values."""
        dicts = [values for optimizer in self._optimizers for values in optimizer.state.values()]
        return [*dicts, *[value for values in dicts for value in values.values()]]


def optimizer_obstacle(optimizers: Sequence[torch.optim.Optimizer], num_own_hooks: int = 0) -> str | None:
    """Why the step of these optimizers cannot be captured."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        hooks: Any = optimizer
        if len(hooks._optimizer_step_pre_hooks) > num_own_hooks or hooks._optimizer_step_post_hooks:
            return f"{name} has step hooks, which a replay does not call"
        for group in optimizer.param_groups:
            is_fused = name in ("Adam", "AdamW") and group.get("fused")
            is_on_device = name == "SGD" or group.get("capturable") or is_fused
            if not is_on_device or type(optimizer).__module__.partition(".")[0] != "torch":
                return f"{name} computes on the host: choose SGD, or Adam or AdamW with fused=True"
            if name == "SGD" and isinstance(group["lr"], torch.Tensor):
                return "SGD reads a learning rate that is a tensor on the host: use a number"
    return None


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
