"""Collects, compares and loads the states of a run in a checkpoint."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from paceline.checkpoint.errors import CheckpointError
from paceline.run.step.build import named_parameters, only_or_all
from paceline.run.step.replica import Replica

Keeps: TypeAlias = Callable[[torch.Tensor], bool]


class HasState(Protocol):
    """An object that can be saved in checkpoints."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def plain_model(model: Any) -> Any:
    """The model without torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)


def model_state(model: Any) -> Mapping[str, Any]:
    """Parameters and buffers by name. A compiled model has the names of the plain one."""
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
    # Modules read the version that wrote the state from here: it is this one.
    values._metadata = getattr(model.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
    model.load_state_dict(values)


def without_wrapper(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """The saved state by the model's own names, if a wrapper around the model was saved.

    Wrappers put a prefix before all names: DistributedDataParallel "module.", torch.compile "_orig_mod.", a
    LightningModule the name of its attribute.
    """
    own = next(iter(now), "")
    for name in saved:
        prefix = name.removesuffix(own)
        if prefix.endswith(".") and saved.keys() == {prefix + each for each in now}:
            return {each: saved[prefix + each] for each in now}
    return saved


def model_differences(saved: Any, now: Mapping[str, Any]) -> list[str]:
    """The tensors in which two models differ, by name, shape and dtype."""
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
    expected = [set(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    # Files have contiguous tensors. Fused kernels need a state in the memory layout of its parameter.
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            is_like_it = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if is_like_it and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    # Checked afterwards, because torch adds settings that an older version did not have.
    for number, (names, group) in enumerate(zip(expected, optimizer.param_groups, strict=True)):
        if missing := sorted(names.difference(group)):
            raise CheckpointError(f"optimizer: group {number} has no {', '.join(map(repr, missing))}, expected a value")
    # torch casts state to its parameter's dtype, which loses precision if the optimizer keeps a finer one.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        own = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.dtype != own[name].dtype:
                own[name] = value.to(own[name].device)


def replica_states(replica: Replica, keeps: Keeps | None = None) -> dict[str, Any]:
    """The states of model, optimizer and scheduler by component name. Tensors are not copied.

    keeps: selects the parameters whose optimizer state to keep, if it is divided among the workers, which then call
    this together; None leaves divided state out.
    """
    states = {"model": model_state(replica.model), "optimizer": optimizer_state(replica, keeps)}
    for scheduler in replica.schedulers:
        if not has_state(scheduler):
            raise TypeError(
                f"the scheduler {type(scheduler).__name__} cannot be saved: it needs state_dict and load_state_dict"
            )
    if replica.schedulers:
        states["scheduler"] = only_or_all([scheduler.state_dict() for scheduler in replica.schedulers])
    return states


def optimizer_state(replica: Replica, keeps: Keeps | None = None) -> Any:
    """The optimizer's state; a list if there are several."""
    if replica.pieces is not None:
        return only_or_all(replica.pieces.settings() if keeps is None else replica.pieces.state_dicts(keeps))
    return only_or_all([optimizer.state_dict() for optimizer in replica.optimizers])


def load_replica(replica: Replica, states: Mapping[str, Any]) -> None:
    """Load the given states."""
    if "model" in states:
        load_model(replica.model, states["model"])
    if "optimizer" in states:
        for number, (optimizer, state) in enumerate(zip(replica.optimizers, listed(states["optimizer"]), strict=True)):
            if replica.pieces is None:
                load_optimizer(optimizer, state)
            else:
                replica.pieces.load(number, state)
    if "scheduler" in states:
        for scheduler, state in zip(replica.schedulers, listed(states["scheduler"]), strict=True):
            scheduler.load_state_dict(state)


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of the generators that user code draws from: Python's, NumPy's, torch's for CPU and device."""
    version, words, gauss = random.getstate()
    return {
        # As a tensor: 625 separate numbers would take longer than everything else.
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def load_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(python_state(state["python"]))
    np.random.set_state(state["numpy"])
    # Copies: torch crashes on a state that is a view into other memory.
    torch.set_rng_state(state["torch"].clone())
    if device.type == "cuda" and state["device"] is not None:
        torch.cuda.set_rng_state(state["device"].clone(), device)


def python_state(saved: Any) -> Any:
    """The argument of `random.setstate`, from what `random_state` returned."""
    version, words, gauss = saved
    return version, tuple(words.tolist()), gauss


def listed(states: Any) -> list[Any]:
    """Undoes `only_or_all`."""
    return states if isinstance(states, list) else [states]


def shown(value: Any) -> str:
    """A value of any kind and size, abbreviated for a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, list(value)[:5])) + (", ..." if len(value) > 5 else "")
        return f"a dict with {keys}" if value else "{}"
    text = repr(value) if isinstance(value, list | tuple | int | float | str | None) else ""
    return text if 0 < len(text) <= 80 else f"a {type(value).__name__}"


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return shown(value)
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
