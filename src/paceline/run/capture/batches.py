"""The inputs of a graph: tensors at fixed addresses, in a fixed structure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from typing import Any

import torch

# Values that can be compared by equality.
_CONSTANTS = (bool, int, float, str, bytes, type(None))
_SEQUENCES = (list, tuple)


class Opaque(Exception):
    """The batch has a value of unknown type, which may change without notice."""


def leaves_of(batch: Any) -> tuple[Hashable, list[torch.Tensor]]:
    """A key that is equal for batches that can share a graph, and the batch's tensors in order."""
    tensors: list[torch.Tensor] = []
    return _shape_of(batch, tensors), tensors


def with_own_memory(batch: Any) -> Any:
    """A copy of the batch with new tensors of the same layout."""
    if isinstance(batch, torch.Tensor):
        return torch.empty_strided(batch.shape, batch.stride(), dtype=batch.dtype, device=batch.device).copy_(batch)
    if isinstance(batch, Mapping):
        own = copy(batch)  # keeps attributes of the type
        own.update({key: with_own_memory(item) for key, item in batch.items()})  # type: ignore[attr-defined]
        return own
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(with_own_memory(item) for item in batch)
    if isinstance(batch, list | tuple):
        return type(batch)(with_own_memory(item) for item in batch)
    return batch


class Inputs:
    """The tensors that a graph reads."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        # Viewed as one dtype, all of them are copied by a single kernel.
        self._are_words = [tensor.dtype == torch.float32 for tensor in tensors]
        self._words = [_words(tensor) for tensor in tensors] if all(map(_has_words, tensors)) else None

    def fill(self, given: Sequence[torch.Tensor], to: Sequence[torch.Tensor] = (), others: Any = ()) -> None:
        """Copy a batch of the same shapes; also copy `others` to `to`, all of one dtype."""
        if self._words is not None and (not to or to[0].dtype == others[0].dtype == torch.float32):
            words = [t if is_words else _words(t) for t, is_words in zip(given, self._are_words, strict=True)]
            torch._foreach_copy_([*self._words, *to], [*words, *others])
            return
        for own, other in zip((*self._tensors, *to), (*given, *others), strict=True):
            own.copy_(other)


def _has_words(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 or (tensor.dtype == torch.int64 and tensor.is_contiguous() and tensor.ndim > 0)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.float32)


def _shape_of(batch: Any, tensors: list[torch.Tensor]) -> Hashable:
    if isinstance(batch, torch.Tensor):
        tensors.append(batch)
        return batch.shape, batch.dtype, batch.stride(), batch.device
    if isinstance(batch, _SEQUENCES):
        return type(batch), *[_shape_of(item, tensors) for item in batch]
    if type(batch) in _CONSTANTS:
        return type(batch), batch
    if isinstance(batch, Mapping) and hasattr(batch, "update"):
        return type(batch), *[(key, _shape_of(item, tensors)) for key, item in batch.items()]
    raise Opaque(f"the batch has a {type(batch).__name__}, whose changes cannot be detected")
