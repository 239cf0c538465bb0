"""Bringing a batch to the device without making either side wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


class DeviceCopier:
    """Moves batches to one device. To a GPU they go through pinned memory, on a stream beside the computing one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Where there is no other device, nothing needs moving.
        self._is_idle = device.type == "cpu" and not torch.cuda.is_available()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        if self._is_idle:
            return batch
        if self._stream is None:
            return to_device(batch, self._device)
        if _lies_on(self._device, batch):
            return batch
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = to_device(batch, self._device, _pinned)
        computing.wait_stream(self._stream)
        # The allocator must not hand the memory out again while the computing stream still reads it.
        visit_tensors(moved, lambda tensor: tensor.record_stream(computing) if tensor.is_cuda else None)
        return moved


def _lies_on(device: torch.device, batch: Any) -> bool:
    devices: set[torch.device] = set()
    visit_tensors(batch, lambda tensor: devices.add(tensor.device))
    return devices == {device}


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.is_cpu and not tensor.is_pinned() else tensor


def to_device(
    batch: Any, device: torch.device, before: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> Any:
    """Every tensor in nested tuples, lists and dicts, moved; anything else as it is."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.device == device else before(value).to(device, non_blocking=True)
        if isinstance(value, PackedSequence):  # a tuple, but one of its tensors stays on the host
            return value.to(device=device, non_blocking=True)  # type: ignore[call-arg]
        if isinstance(value, MutableMapping):
            moved = copy(value)  # keeps what the type holds beside its items, such as a defaultdict's factory
            moved.update({key: move(item) for key, item in value.items()})
            return moved
        if isinstance(value, Mapping):
            return type(value)({key: move(item) for key, item in value.items()})  # type: ignore[call-arg]
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(move(item) for item in value)
        if isinstance(value, list | tuple):
            return type(value)(move(item) for item in value)
        return value

    return move(batch)


def visit_tensors(batch: Any, visit: Callable[[torch.Tensor], object]) -> None:
    if isinstance(batch, torch.Tensor):
        visit(batch)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            visit_tensors(value, visit)
    elif isinstance(batch, list | tuple):
        for value in batch:
            visit_tensors(value, visit)
