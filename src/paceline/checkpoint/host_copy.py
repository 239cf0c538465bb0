"""Copies of tensors in host memory that is used again and again: what training waits for when it saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# Every copy starts at a multiple of this: as torch's own allocations do.
ALIGNMENT_BYTES = 64


class HostCopy:
    """Memory for one copy of a state at a time, pinned where the state is on a GPU.

    It grows when a state does not fit and is kept from copy to copy: writing to memory for the first time takes
    several times as long as writing to it again.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: list[tuple[Any, ...]] = []
        self._places: list[torch.Tensor] = []

    def reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the memory for these tensors ready, so that the next `take` of such tensors only copies."""
        layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        is_pinned = any(tensor.is_cuda for tensor in tensors)
        sizes = [-(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for tensor in tensors]
        if sum(sizes) > self._memory.numel() or (is_pinned and not self._memory.is_pinned()):
            self._places.clear()
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old before asking for the new
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_pinned).zero_()
        elif layout == self._layout:
            return
        self._places = [
            room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, room in zip(tensors, self._memory[: sum(sizes)].split(sizes), strict=True)
        ]
        self._layout = layout

    def take(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """Copy the tensors. Returns the copies and a function that waits until those from GPUs have arrived.

        Copies from a GPU are in line with its current stream: what is launched there afterwards may change the
        tensors, and the host need not wait before it launches it. The copies are good until the next call.
        """
        self.reserve(tensors)
        for place, tensor in zip(self._places, tensors, strict=True):
            place.copy_(tensor, non_blocking=tensor.is_cuda)
        events = [_event_on(device) for device in {tensor.device for tensor in tensors if tensor.is_cuda}]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return self._places, wait


def _event_on(device: torch.device) -> Any:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
