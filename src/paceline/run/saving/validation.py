"""Checks the structure of states from a checkpoint before any of them is loaded.

The files of a checkpoint can be intact and have other content, from another program or version. Each function returns
one line per problem, with the actual and the expected value.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.plan.epoch import Position
from paceline.run.saving.state import listed, model_differences, python_state, shown
from paceline.run.step.build import only_or_all
from paceline.run.step.replica import Replica

# State of torch's own optimizers in tensors of their parameter's shape.
_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg")
_ENGINE: dict[str, Any] = {"position": {}, "loss_scale": None, "exchange": {}, "num_workers": 1, "planner": {}}
_OPTIMIZER: dict[str, Any] = {"state": {}, "param_groups": []}

# Only trying, on a separate generator, shows whether a generator accepts a state.
_GENERATORS: dict[str, Callable[[Any], object]] = {
    "python": lambda state: random.Random().setstate(python_state(state)),
    "numpy": lambda state: np.random.RandomState().set_state(state),
    "torch": lambda state: torch.Generator().set_state(state),
}


def structure_problems(states: Mapping[str, Any], step: int) -> list[str]:
    """Problems of the states of any run. `step`: the one in the manifest."""
    problems = []
    if "engine" in states:
        problems += _engine_problems(states["engine"], step)
    if "model" in states and not isinstance(states["model"], Mapping):
        problems += model_differences(states["model"], {})
    for state in listed(states["optimizer"]) if "optimizer" in states else ():
        problems += _mismatches("optimizer", state, _OPTIMIZER) or [
            f"optimizer: group {number} is {shown(group)}, expected a dict with 'params'"
            for number, group in enumerate(state["param_groups"])
            if not isinstance(group, Mapping) or not isinstance(group.get("params"), list)
        ]
    for state in listed(states["scheduler"]) if "scheduler" in states else ():
        problems += _mismatches("scheduler", state, {})
    if "random" in states:
        problems += _random_problems(states["random"])
    return problems


def replica_problems(states: Mapping[str, Any], replica: Replica) -> list[str]:
    """Problems of optimizer and scheduler states that passed `structure_problems`, for this replica."""
    problems = []
    if "optimizer" in states:
        for state, optimizer in zip(listed(states["optimizer"]), replica.optimizers, strict=True):
            problems += _optimizer_problems(state, optimizer)
    if "scheduler" in states:
        saved, schedulers = listed(states["scheduler"]), replica.schedulers
        if len(saved) != len(schedulers):
            return [*problems, f"scheduler: there are {len(saved)} states, expected {len(schedulers)}"]
        for state, scheduler in zip(saved, schedulers, strict=True):
            if _is_of_torch(scheduler):  # a missing value would silently keep its initial value
                public = {name: v for name, v in sorted(scheduler.state_dict().items()) if not name.startswith("_")}
                problems += _mismatches("scheduler", state, public)
    return problems


def optimizer_differences(saved: Any, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Whether the number of optimizers, or of parameters in their groups, differs."""
    groups = [state["param_groups"] for state in listed(saved)], [optimizer.param_groups for optimizer in optimizers]
    before, now = ([[len(group["params"]) for group in each] for each in side] for side in groups)
    if before == now:
        return []
    texts = only_or_all(before), only_or_all(now)
    return [f"optimizer: its groups had {texts[0]} parameters in the checkpoint, {texts[1]} now"]


def _engine_problems(state: Any, step: int) -> list[str]:
    if problems := _mismatches("engine", state, _ENGINE):
        return problems
    try:
        position = Position.from_dict(state["position"])
        if position.step != step:
            problems.append(f"engine: its position is at step {position.step}, the manifest says {step}")
    except (ValueError, TypeError) as error:
        problems.append(f"engine: {error}")
    return problems


def _random_problems(state: Any) -> list[str]:
    problems = _mismatches("random", state, dict.fromkeys([*_GENERATORS, "device"]))
    for name, load in _GENERATORS.items() if not problems else ():
        try:
            load(state[name])
        except Exception as error:
            problems.append(f"random: {name!r} is not a generator's state: {type(error).__name__}: {error}")
    return problems


def _optimizer_problems(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> list[str]:
    problems = []
    for number, (saved, now) in enumerate(zip(state["param_groups"], optimizer.param_groups, strict=False)):
        shared = {name: now[name] for name in now if name in saved and name != "params"}
        problems += _mismatches("optimizer", saved, shared, f"group {number}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        if type(index) is not int or not 0 <= index < len(parameters):
            last = len(parameters) - 1
            problems.append(f"optimizer: it has the state of parameter {shown(index)}, expected 0 to {last}")
        else:
            problems += _mismatches("optimizer", values, {}, f"the state of parameter {index}")
    if problems or not _is_of_torch(optimizer):
        return problems
    for group in state["param_groups"]:
        entries = {index: state["state"][index] for index in group["params"] if state["state"].get(index)}
        names = sorted({n for values in entries.values() for n in values if n == "step" or n in _LIKE_PARAMETER})
        for index, values in entries.items():
            # A state without one of the names is incomplete; a value of None is not used by this optimizer.
            expected = {name: parameters[index] if name in _LIKE_PARAMETER else None for name in names}
            expected |= {name: None for name in names if values.get(name, 0) is None}
            problems += _mismatches("optimizer", values, expected, f"the state of parameter {index}")
    return problems


def _mismatches(component: str, saved: Any, expected: Mapping[str, Any], where: str = "") -> list[str]:
    """The missing keys, and values of another kind, in `saved`: a component, or the part of it that `where` names."""
    if not isinstance(saved, Mapping):
        return [f"{component}: {where or 'it'} is {shown(saved)}, expected a dict"]
    if missing := [name for name in expected if name not in saved]:
        return [f"{component}: {where or 'it'} has no {', '.join(map(repr, missing))}"]
    of = f" of {where}" if where else ""
    return [
        f"{component}: {name!r}{of} is {shown(saved[name])}, expected {kind}"
        for name, value in expected.items()
        if (kind := _missed_kind(saved[name], value))
    ]


def _missed_kind(saved: Any, expected: Any) -> str:
    """The kind of `expected` (a dict, list, number, several numbers or tensor) if `saved` is not of this kind."""
    if isinstance(expected, torch.Tensor) and expected.numel() != 1:
        is_alike, kind = getattr(saved, "shape", None) == expected.shape, f"a tensor of shape {tuple(expected.shape)}"
    elif isinstance(expected, Mapping):
        is_alike, kind = isinstance(saved, Mapping), "a dict"
    elif isinstance(expected, list | tuple) and all(map(_is_number, expected)):
        is_alike, kind = isinstance(saved, list | tuple), "a list"
        if expected:
            is_alike = is_alike and len(saved) == len(expected) and all(map(_is_number, saved))
            kind = f"{len(expected)} number" + "s" * (len(expected) > 1)
    else:
        is_alike, kind = _is_number(saved) or not _is_number(expected), "a number"
    return "" if is_alike else kind


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_of_torch(thing: Any) -> bool:
    return type(thing).__module__.startswith("torch.optim.")
