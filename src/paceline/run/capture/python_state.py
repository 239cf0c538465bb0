"""The Python state that a forward pass depends on. A replay runs no Python, so this state must be unchanged."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn


class PythonState:
    """A snapshot of a model's modules: attributes, and addresses of parameters and buffers."""

    def __init__(self, model: Any, parameters: Sequence[torch.Tensor]) -> None:
        modules = list(model.named_modules()) if isinstance(model, nn.Module) else []
        self._names = [name or "model" for name, _ in modules]
        self._attributes = [module.__dict__ for _, module in modules]
        self._before = [dict(attributes) for attributes in self._attributes]
        # Compared by identity: comparing values would wait for the device.
        held = [(attributes, key, value) for attributes in self._attributes for key, value in attributes.items()]
        held += [(module._buffers, key, value) for _, module in modules for key, value in module._buffers.items()]
        self._tensors = [item for item in held if isinstance(item[2], torch.Tensor)]
        self._placed = [*parameters, *(tensor for _, _, tensor in self._tensors)]
        self._places = [tensor.data_ptr() for tensor in self._placed]

    def change(self) -> str | None:
        """What has changed; None if nothing has."""
        if [tensor.data_ptr() for tensor in self._placed] != self._places:
            return "a parameter or buffer has moved to other memory"
        for holder, key, tensor in self._tensors:
            if holder.get(key) is not tensor:
                return f"{key!r} was replaced by another tensor"
        try:
            if self._attributes != self._before:
                return self._changed_attributes()
        except (RuntimeError, ValueError):  # arrays cannot be compared this way
            return self._changed_attributes()
        return None

    def restore(self) -> None:
        """Restore all attributes and buffers."""
        for attributes, before in zip(self._attributes, self._before, strict=True):
            attributes.clear()
            attributes.update(before)
        for holder, key, tensor in self._tensors:
            holder[key] = tensor

    def _changed_attributes(self) -> str:
        for name, attributes, before in zip(self._names, self._attributes, self._before, strict=True):
            keys = {**attributes, **before}
            changed = [repr(key) for key in keys if not _are_same(attributes.get(key), before.get(key))]
            if changed:
                return f"{', '.join(changed)} of {name!r} changed"
        return "an attribute of the model changed"


class RandomState:
    """A snapshot of the generators of host and device. A replay repeats host numbers that were drawn at capture."""

    def __init__(self, device: torch.device) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)
        self._torch = torch.default_generator.get_state()
        self._on_device = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
        self._state_on_device = None if self._on_device is None else self._on_device.get_state()

    def has_moved_on_host(self) -> bool:
        now, then = np.random.get_state(legacy=False)["state"], self._numpy["state"]
        return (
            random.getstate() != self._python
            or not torch.equal(torch.default_generator.get_state(), self._torch)
            or now["pos"] != then["pos"]
            or not np.array_equal(now["key"], then["key"])
        )

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)
        if self._on_device is not None and self._state_on_device is not None:
            self._on_device.set_state(self._state_on_device)


def hook_of_user(model: Any, parameters: Mapping[str, torch.Tensor], num_own: int) -> str | None:
    """A parameter or module with gradient hooks of the user, which a replay would not call.

    num_own: hooks of the exchange per parameter.
    """
    for name, parameter in parameters.items():
        tensor: Any = parameter
        if tensor._backward_hooks or len(tensor._post_accumulate_grad_hooks or ()) > num_own:
            return f"parameter {name!r} has a gradient hook, which a replay does not call"
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if module._backward_hooks or module._backward_pre_hooks:
            return f"module {name!r} has a backward hook, which a replay does not call"
    return None


def _are_same(value: Any, before: Any) -> bool:
    return value is before or (isinstance(value, bool | int | float | str) and value == before)
