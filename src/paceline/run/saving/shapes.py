"""Whether states that were read from a checkpoint are of the shape that a run saves, before any of them is loaded.

A checkpoint's files can be intact and hold something else: another program wrote them, or another version. Each
function returns a line per problem, with what was found and what was expected; none where there is nothing wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.plan.steps import Position
from paceline.run.step.replica import only_or_all

# What torch's own optimizers keep in tensors of their parameter's shape.
_LIKE_THE_PARAMETER = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
)
_ENGINE = ("position", "loss_scale", "exchange", "num_workers", "planner")


def shown(value: Any) -> str:
    """A value of unknown kind and size, for a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with {_quoted(list(value)[:5])}" + (", ..." if len(value) > 5 else "") if value else "{}"
    scalars = value if isinstance(value, list | tuple) else [value]
    is_short = len(scalars) <= 4 and all(each is None or isinstance(each, int | float | str) for each in scalars)
    return text if is_short and len(text := repr(value)) <= 80 else f"a {type(value).__name__}"


def engine_problems(state: Any, step: int) -> list[str]:
    """`step`: the one that the manifest says."""
    if problems := _missing(state, _ENGINE):
        return [f"engine: {problem}" for problem in problems]
    problems = []
    try:
        position = Position.from_dict(state["position"])
        if position.step != step:
            problems.append(f"its position is at step {position.step}, the manifest says {step}")
    except (ValueError, TypeError) as error:
        problems.append(str(error))
    for name in ("exchange", "planner"):
        if not isinstance(state[name], Mapping):
            problems.append(f"{name!r} is {shown(state[name])}, expected a dict")
    trained = state.get("trained", [])
    if not isinstance(trained, list) or not all(isinstance(name, str) for name in trained):
        problems.append(f"'trained' is {shown(trained)}, expected a list of names")
    grids = state["exchange"].get("grids", {}) if isinstance(state["exchange"], Mapping) else {}
    if not isinstance(grids, Mapping) or not all(type(top) is int for top in grids.values()):
        problems.append(f"'grids' of 'exchange' is {shown(grids)}, expected a dict of integers")
    count, scale = state["num_workers"], state["loss_scale"]
    if type(count) is not int or count < 1:
        problems.append(f"'num_workers' is {shown(count)}, expected an integer >= 1")
    names = ("value", "steps_since_change")
    if scale is not None and (_missing(scale, names) or not all(_is_number(scale[name]) for name in names)):
        problems.append(f"'loss_scale' is {shown(scale)}, expected None or a dict of numbers, {_quoted(names)}")
    return [f"engine: {problem}" for problem in problems]


def random_problems(state: Any) -> list[str]:
    if problems := _missing(state, ("python", "numpy", "torch", "device")):
        return [f"random: {problem}" for problem in problems]
    # Each is tried on a generator of its own: only that knows for sure.
    tries: dict[str, tuple[str, Callable[[Any], object]]] = {
        "python": ("Python's", lambda found: random.Random().setstate(python_state(found))),
        "numpy": ("NumPy's", lambda found: np.random.RandomState().set_state(found)),
        "torch": ("torch's", lambda found: torch.Generator().set_state(found)),
    }
    lines = []
    for name, (whose, load) in tries.items():
        try:
            load(state[name])
        except Exception as error:
            lines.append(f"random: {name!r} is not a state of {whose} generator: {type(error).__name__}: {error}")
    return lines


def python_state(found: Any) -> Any:
    """What `random.setstate` takes, from what was saved."""
    version, words, gauss = found
    return version, tuple(words.tolist()), gauss


def scheduler_problems(states: Sequence[Any], schedulers: Sequence[Any]) -> list[str]:
    """Of torch's own schedulers, whose state is all that they have: what is missing would keep its first value."""
    if len(states) != len(schedulers):
        return [f"scheduler: there are {len(states)} states, expected {len(schedulers)}, one for each scheduler"]
    lines = []
    for state, scheduler in zip(states, schedulers, strict=True):
        if not type(scheduler).__module__.startswith("torch.optim."):
            continue
        now = {name: value for name, value in scheduler.state_dict().items() if not name.startswith("_")}
        problems = _missing(state, sorted(now))
        if not problems:
            unknown = [name for name in state if not str(name).startswith("_") and name not in now]
            problems = [f"it has {name!r}, which a {type(scheduler).__name__} does not have" for name in unknown]
            problems += [line for name in now for line in _value_problems(f"{name!r}", state[name], now[name])]
        lines += [f"scheduler: {problem}" for problem in problems]
    return lines


def optimizer_differences(saved: Sequence[Any], now: Sequence[Any]) -> list[str]:
    """Whether there are as many optimizers as there were, and their groups have as many parameters."""
    counts = [
        [[len(group["params"]) for group in state["param_groups"]] for state in states] for states in (saved, now)
    ]
    if counts[0] == counts[1]:
        return []
    before, after = map(only_or_all, counts)
    return [f"optimizer: its groups had {before} parameters in the checkpoint, {after} now"]


def group_problems(states: Sequence[Any]) -> list[str]:
    """Of the states of all optimizers: whether there are groups in them."""
    return [f"optimizer: {line}" for state in states for line in _group_problems(state)]


def optimizer_problems(states: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Of states whose groups are these optimizers'."""
    pairs = zip(states, optimizers, strict=True)
    return [f"optimizer: {line}" for state, own in pairs for line in _state_problems(state, own)]


def _group_problems(state: Any) -> list[str]:
    is_dict = isinstance(state, Mapping)
    if not is_dict or not isinstance(state.get("state"), Mapping) or not isinstance(state.get("param_groups"), list):
        return [f"it is {shown(state)}, expected a dict with 'state' and 'param_groups'"]
    return [
        f"group {number} is {shown(group)}, expected a dict with 'params'"
        for number, group in enumerate(state["param_groups"])
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list)
    ]


def _state_problems(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> list[str]:
    lines = []
    for number, (saved, now) in enumerate(zip(state["param_groups"], optimizer.param_groups, strict=False)):
        for name in saved.keys() & now.keys() - {"params"}:
            lines += _value_problems(f"{name!r} of group {number}", saved[name], now[name])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        if type(index) is not int or not 0 <= index < len(parameters):
            lines.append(f"it has the state of parameter {shown(index)}, expected 0 to {len(parameters) - 1}")
        elif not isinstance(values, Mapping):
            lines.append(f"the state of parameter {index} is {shown(values)}, expected a dict")
    if lines or not type(optimizer).__module__.startswith("torch.optim."):
        return lines
    return _tensor_problems(state, parameters)


def _tensor_problems(state: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> list[str]:
    """Of what one of torch's own optimizers keeps for each parameter."""
    lines = []
    for group in state["param_groups"]:
        entries = {index: state["state"][index] for index in group["params"] if state["state"].get(index)}
        usual = {name for values in entries.values() for name in values if name in ("step", *_LIKE_THE_PARAMETER)}
        for index, values in entries.items():
            shape = tuple(parameters[index].shape)
            for name in sorted(usual):
                value = values.get(name)
                if name not in values:
                    lines.append(f"the state of parameter {index} has no {name!r}, which others of its group have")
                elif name != "step" and value is not None and getattr(value, "shape", None) != shape:
                    expected = f"{shape}" if isinstance(value, torch.Tensor) else f"a tensor of shape {shape}"
                    lines.append(f"{name!r} of parameter {index} is {shown(value)}, expected {expected}")
    return lines


def _value_problems(what: str, saved: Any, now: Any) -> list[str]:
    """Whether a setting that is a number, or several, still is."""
    if isinstance(now, list | tuple) and now and all(map(_is_number, now)):
        is_like = isinstance(saved, list | tuple) and len(saved) == len(now) and all(map(_is_number, saved))
        expected = f"{len(now)} number" + "s" * (len(now) > 1)
        return [] if is_like else [f"{what} is {shown(saved)}, expected {expected}"]
    if _is_number(now) and not _is_number(saved):
        return [f"{what} is {shown(saved)}, expected a number"]
    return []


def _missing(state: Any, names: Sequence[str]) -> list[str]:
    if not isinstance(state, Mapping):
        return [f"it is {shown(state)}, expected a dict"]
    missing = [name for name in names if name not in state]
    return [f"it has no {_quoted(missing)}"] if missing else []


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _quoted(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names))
