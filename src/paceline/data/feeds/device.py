"""Copies of batches to the device, overlapped with computation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


class DeviceCopier:
    """Moves batches to one device. Copies to a GPU go through pinned memory, on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_noop = device.type == "cpu" and not torch.cuda.is_available()  # tensors can only be on the CPU
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        if self.is_noop:
            return batch
        if self._stream is None:
            return to_device(batch, self._device)
        if {tensor.device for tensor in tensors_in(batch)} == {self._device}:
            return batch
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = to_device(batch, self._device, pin=True)
        computing.wait_stream(self._stream)
        for tensor in tensors_in(moved):
            if tensor.is_cuda:
                tensor.record_stream(computing)  # the allocator must not reuse the memory before this stream is done
        return moved


def to_device(batch: Any, device: torch.device, *, pin: bool = False) -> Any:
    """The batch with all tensors in nested tuples, lists, dicts and data classes on the device.

    `pin`: they are copied from pinned memory.
    """

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device == device:
                return value
            pinned = value.pin_memory() if pin and value.is_cpu and not value.is_pinned() else value
            return pinned.to(device, non_blocking=True)
        if isinstance(value, PackedSequence):  # a tuple, but one of its tensors stays on the host
            return value.to(device=device, non_blocking=True)  # type: ignore[call-arg]
        return map_items(value, move)

    return move(batch)


def map_items(value: Any, function: Callable[[Any], Any]) -> Any:
    """A container of the same type with `function` applied to its items; any other value is returned unchanged."""
    # First: outputs of transformers are dicts too, but cannot be updated.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {each.name: function(getattr(value, each.name)) for each in dataclasses.fields(value) if each.init}
        return dataclasses.replace(value, **items)
    if isinstance(value, Mapping):
        items = {key: function(item) for key, item in value.items()}
        if not hasattr(value, "update"):
            return type(value)(items)  # type: ignore[call-arg]
        mapped = copy(value)  # keeps the type's other state, such as the factory of a defaultdict
        mapped.update(items)
        return mapped
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(function, value))
    return type(value)(map(function, value)) if isinstance(value, list | tuple) else value


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists, dicts and data classes."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = [getattr(batch, each.name) for each in dataclasses.fields(batch)]
    if isinstance(batch, Mapping | list | tuple):
        items = batch.values() if isinstance(batch, Mapping) else batch
        return [tensor for item in items for tensor in tensors_in(item)]
    return []
