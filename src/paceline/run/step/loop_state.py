"""The state of a loop besides weights and optimizers: for checkpoints, and for a worker that takes it over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.plan.epoch import Position
from paceline.run.step.loop import Loop
from paceline.run.step.record import StepRecord


def state_of(loop: Loop) -> dict[str, Any]:
    """The position, and all state of the next step besides weights and optimizers, equal on all workers."""
    scale = loop.loss_scale if loop.exchange.averages is None else None  # else each worker has its own
    return {
        "position": loop.position.to_dict(),
        "trained": loop.replica.names_to_train(),
        "groups": loop.replica.group_names(),
        "loss_scale": None if scale is None else scale.state_dict(),
        "exchange": loop.exchange.state_dict(),
        "num_workers": loop.world.size,
        "planner": loop.planner.state_dict(),
    }


def load_state(loop: Loop, state: Mapping[str, Any]) -> None:
    """Restore `state_of`. The planner's measurements are used only in a world of the same size."""
    _load_position(loop, state)
    if "trained" in state:
        loop.replica.set_trained(state["trained"])
        if loop.replica.has_changed():
            loop.replica.take_changes()
            loop.parameter_changes.use()
    loop.exchange.load_state_dict(state["exchange"])
    if state["num_workers"] == loop.world.size:
        loop.planner.load_state_dict(state["planner"])


def handover(loop: Loop) -> dict[str, Any]:
    """The state, besides weights and optimizers, with which another worker can take over this one's position."""
    record = loop.last_record
    return {
        "engine": state_of(loop),
        "record": None if record is None else record.to_dict(),
        "ended_epoch": loop.ended_epoch,
    }


def take_over(loop: Loop, state: Mapping[str, Any], *, is_joining: bool) -> None:
    """Continue from another worker's `handover`.

    A worker that was one step behind still has to run the hooks of that step. One that joins runs none of them. The
    planner gets its state when the world changes (`Loop.regroup`).
    """
    engine = state["engine"]
    _load_position(loop, engine)
    loop.replica.set_trained(engine["trained"])
    if loop.replica.has_changed():
        loop.replica.take_changes()
    loop.replica.note_schedulers()
    loop.exchange.load_state_dict(engine["exchange"])
    if state["record"] is not None:
        loop.last_record = record = StepRecord.from_dict(state["record"])
        loop.hooks.due.clear()
        if is_joining:
            loop.ended_epoch = state["ended_epoch"]
        else:
            loop.hooks.queue_step(record)
            loop.step_to_seed = record.step - 1  # its hooks draw the same random numbers as on the other workers


def _load_position(loop: Loop, state: Mapping[str, Any]) -> None:
    loop.position = Position.from_dict(state["position"])
    loop.events.step = loop.position.step
    if loop.loss_scale is not None and state["loss_scale"] is not None:
        loop.loss_scale.load_state_dict(state["loss_scale"])
