"""What a checkpoint holds of a run, and putting it back."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.errors import CheckpointError
from paceline.run.saving.shapes import python_state, shown
from paceline.run.step.replica import Replica, named_parameters, only_or_all


def model_state(model: Any) -> Mapping[str, Any]:
    """Parameters and buffers by name, those of a compiled model under the names they have in the plain one."""
    model = plain_model(model)
    if has_state(model):
        state: Mapping[str, Any] = model.state_dict()
        return state
    return named_parameters(model)


@torch.no_grad()
def load_model(model: Any, state: Mapping[str, Any]) -> None:
    model = plain_model(model)
    if not has_state(model):
        for name, parameter in named_parameters(model).items():
            parameter.copy_(state[name])
        return
    values = OrderedDict(state)
    # Modules look here for the version that wrote the state, and it was this one.
    values._metadata = getattr(model.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
    model.load_state_dict(values)


def model_differences(saved: Any, now: Mapping[str, Any]) -> list[str]:
    """In which tensors two models differ, by name, shape and dtype."""
    if not isinstance(saved, Mapping):
        return [f"model: it is {shown(saved)}, expected a dict of tensors by name"]
    lines = [f"{name!r} is only in the checkpoint" for name in saved if name not in now]
    lines += [f"{name!r} is not in the checkpoint" for name in now if name not in saved]
    for name in saved:
        old, new = saved[name], now.get(name)
        if isinstance(new, torch.Tensor) and _kind(old) != _kind(new):
            lines.append(f"{name!r} is {_kind(old)} in the checkpoint, {_kind(new)} now")
    return [f"model: tensor {line}" for line in lines]


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    settings = [set(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    # Only now, since torch fills in by itself what an older version did not have.
    for number, (names, group) in enumerate(zip(settings, optimizer.param_groups, strict=True)):
        if missing := sorted(names.difference(group)):
            raise CheckpointError(f"optimizer: group {number} has no {', '.join(map(repr, missing))}, expected a value")
    # torch casts state to its parameter's dtype, which loses what an optimizer keeps in a finer one.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        own = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.dtype != own[name].dtype:
                own[name] = value.to(own[name].device)


def replica_states(replica: Replica) -> dict[str, Any]:
    """The states of model, optimizer and scheduler, by the component's name. Their tensors are the replica's own."""
    states = {"model": model_state(replica.model), "optimizer": optimizer_state(replica)}
    for scheduler in replica.schedulers:
        if not has_state(scheduler):
            raise TypeError(
                f"the scheduler is a {type(scheduler).__name__} without state_dict and load_state_dict: it "
                "cannot be saved; give it both"
            )
    if replica.schedulers:
        states["scheduler"] = only_or_all([scheduler.state_dict() for scheduler in replica.schedulers])
    return states


def optimizer_state(replica: Replica) -> Any:
    """The optimizer's state; a list where there are several."""
    return only_or_all([optimizer.state_dict() for optimizer in replica.optimizers])


def load_replica(replica: Replica, states: Mapping[str, Any]) -> None:
    """Put back those of the states that are there."""
    if "model" in states:
        load_model(replica.model, states["model"])
    if "optimizer" in states:
        for optimizer, state in zip(replica.optimizers, listed(states["optimizer"]), strict=True):
            load_optimizer(optimizer, state)
    if "scheduler" in states:
        for scheduler, state in zip(replica.schedulers, listed(states["scheduler"]), strict=True):
            scheduler.load_state_dict(state)


def random_state(device: torch.device) -> dict[str, Any]:
    """Of the generators that the user's code draws from: Python's, NumPy's, torch's for CPU and device."""
    version, words, gauss = random.getstate()
    return {
        # As a tensor: six hundred numbers, one by one, would take longer than all the rest.
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def load_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(python_state(state["python"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["device"] is not None:
        torch.cuda.set_rng_state(state["device"], device)


def listed(states: Any) -> list[Any]:
    """The states of several, as `only_or_all` put them together."""
    return states if isinstance(states, list) else [states]


def plain_model(model: Any) -> Any:
    """The model without torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)


def has_state(thing: Any) -> bool:
    """Whether it can take part in checkpoints."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return shown(value)
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
