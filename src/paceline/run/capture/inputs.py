"""The inputs of a graph: tensors at fixed addresses, in a fixed structure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from paceline.data.feeds.device import map_items
from paceline.run.capture.graphs import CaptureFailed

# Values that can be compared by equality.
_CONSTANTS = (bool, int, float, str, bytes, type(None))


def leaves_of(batch: Any) -> tuple[Hashable, list[torch.Tensor]]:
    """A key that is equal for batches that can share a graph, and the batch's tensors in order."""
    tensors: list[torch.Tensor] = []
    return _shape_of(batch, tensors), tensors


class Inputs:
    """A copy of a batch that a graph reads: new tensors of the same layout."""

    def __init__(self, batch: Any) -> None:
        try:
            self.batch = _copied(batch)
        except RuntimeError as error:
            reason = f"the batch cannot be copied: {str(error).splitlines()[0]}"
            raise CaptureFailed(reason) from None
        self._tensors = leaves_of(self.batch)[1]
        # Viewed as one dtype, all of them are copied by a single kernel.
        self._words = [_words(tensor) for tensor in self._tensors] if all(map(_has_words, self._tensors)) else None

    def fill(self, given: Sequence[torch.Tensor], to: Sequence[torch.Tensor] = (), others: Any = ()) -> None:
        """Copy the tensors of another batch of this shape; also copy `others` to `to`. Both have one dtype."""
        if self._words and (not to or to[0].dtype == others[0].dtype == torch.float32):
            torch._foreach_copy_([*self._words, *to], [*map(_words, given), *others])
            return
        for own, other in zip((*self._tensors, *to), (*given, *others), strict=True):
            own.copy_(other)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    return map_items(value, _copied)


def _has_words(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 or (tensor.dtype == torch.int64 and tensor.is_contiguous() and tensor.ndim > 0)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float32 else tensor.view(torch.float32)


def _shape_of(batch: Any, tensors: list[torch.Tensor]) -> Hashable:
    if isinstance(batch, torch.Tensor):
        tensors.append(batch)
        return batch.shape, batch.dtype, batch.stride(), batch.device
    if isinstance(batch, list | tuple):
        return type(batch), *[_shape_of(item, tensors) for item in batch]
    if type(batch) in _CONSTANTS:
        return type(batch), batch
    if isinstance(batch, Mapping) and hasattr(batch, "update"):
        return type(batch), *[(key, _shape_of(item, tensors)) for key, item in batch.items()]
    raise CaptureFailed(f"the batch has a value of type {type(batch).__name__}, whose changes cannot be detected")
