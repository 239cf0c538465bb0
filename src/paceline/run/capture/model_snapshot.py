"""The Python state that a forward pass depends on. A replay runs no Python, so this state must be unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


class ModelSnapshot:
    """A snapshot of a model's modules: attributes, and addresses of parameters and buffers."""

    def __init__(self, model: Any, parameters: Iterable[torch.Tensor]) -> None:
        modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
        self._names = [name or "model" for name in modules]
        self._attributes = [module.__dict__ for module in modules.values()]
        self._before = [dict(attributes) for attributes in self._attributes]
        # Compared by identity: comparing values would wait for the device.
        holders = [holder for module in modules.values() for holder in (module.__dict__, module._buffers)]
        self._tensors = [
            (holder, key, value)
            for holder in holders
            for key, value in holder.items()
            if isinstance(value, torch.Tensor)
        ]
        self._placed = [*parameters, *(tensor for _, _, tensor in self._tensors)]
        self._addresses = [tensor.data_ptr() for tensor in self._placed]

    def change(self) -> str | None:
        """What has changed; None if nothing has."""
        if [tensor.data_ptr() for tensor in self._placed] != self._addresses:
            return "a parameter or buffer has moved to other memory"
        for holder, key, tensor in self._tensors:
            if holder.get(key) is not tensor:
                return f"{key!r} was replaced by another tensor"
        try:
            return self._changed_attributes() if self._attributes != self._before else None
        except (RuntimeError, ValueError):  # arrays have no single truth value
            return self._changed_attributes()

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
            if changed := [repr(key) for key in keys if not _are_same(attributes.get(key), before.get(key))]:
                return f"{', '.join(changed)} of {name!r} changed"
        return "an attribute of the model changed"


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
