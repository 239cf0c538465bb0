"""Host memory for a copy of the training state. A save blocks training for this copy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.checkpoint.files import ALIGNMENT_BYTES


class HostStaging:
    """A buffer for one copy of a state, pinned if the state is on a GPU.

    It is reused and grows when a state does not fit: the first write to memory takes several times as long as later
    ones.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._copies: list[torch.Tensor] = []

    def reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate the memory for these tensors. `copy` does it on demand."""
        layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        is_pinned = any(tensor.is_cuda for tensor in tensors)
        sizes = [-(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for tensor in tensors]
        if sum(sizes) > self._memory.numel() or (is_pinned and not self._memory.is_pinned()):
            self._copies.clear()
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before allocating
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_pinned).zero_()
        elif layout == self._layout:
            return
        self._copies = [
            memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, memory in zip(tensors, self._memory[: sum(sizes)].split(sizes), strict=True)
        ]
        self._layout = layout

    def copy(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """Copy the tensors. Returns the copies, valid until the next call, and a function that waits for them.

        Copies from a GPU are queued on its current stream: kernels launched afterwards may change the tensors, and the
        host does not have to wait before it launches them.
        """
        self.reserve(tensors)
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=tensor.is_cuda)
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return self._copies, wait
