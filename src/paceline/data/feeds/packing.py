"""A nested batch as a small description and one block of memory, so that it can be handed to another process."""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

# A micro-batch's tensors start on a cache line: on unaligned inputs some kernels give other results.
ALIGNMENT = 64
# Up to here copying costs less than another mapping, and no descriptor stays open for those who keep batches.
SMALL = 1 << 20


_Memory: TypeAlias = mmap.mmap


class _Place(NamedTuple):
    """Stands for a tensor in the description."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_numpy: bool


class Packed:
    """A block of memory without a name, that another process can map."""

    def __init__(self, size: int) -> None:
        self.descriptor = os.memfd_create("paceline-batch", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, size)
            self.memory = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        os.close(self.descriptor)


def pack(batch: Any) -> tuple[Any, Packed | None]:
    """The batch with places instead of its tensors, and the tensors' memory; None where there are none."""
    packer = _Packer()
    described = packer.describe(batch)
    return described, packer.packed()


def unpack(described: Any, descriptor: int | None) -> Any:
    """The batch that `pack` described. Takes over `descriptor`.

    Large tensors are that memory, which lives as long as any of them; each such batch holds a file descriptor open.
    """
    if descriptor is None:
        return _restore(described, None)
    try:
        size = os.fstat(descriptor).st_size
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    return _restore(described, memory, copy=size <= SMALL)


class _Packer:
    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._offsets = [0]

    def describe(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.layout == torch.strided:
            return self._place(value, is_numpy=False)
        if type(value) is np.ndarray and value.dtype.kind in "biuf" and value.dtype.isnative and value.size:
            try:
                return self._place(torch.from_numpy(np.ascontiguousarray(value)), is_numpy=True)
            except TypeError:  # a type that torch lacks
                return value
        return rebuild(value, self.describe)

    def packed(self) -> Packed | None:
        if not self._offsets[-1]:
            return None
        packed = Packed(self._offsets[-1])
        for tensor, offset in zip(self._tensors, self._offsets, strict=False):
            if tensor.numel():
                _view(packed.memory, offset, tensor.shape, tensor.dtype).copy_(tensor)
        return packed

    def _place(self, tensor: torch.Tensor, *, is_numpy: bool) -> _Place:
        tensor = tensor.detach().cpu().contiguous()
        offset = self._offsets[-1]
        self._tensors.append(tensor)
        self._offsets.append(offset + -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT)
        return _Place(offset, tuple(tensor.shape), tensor.dtype, is_numpy)


def _restore(value: Any, memory: _Memory | None, *, copy: bool = False) -> Any:
    # No closure that knows itself: such a cycle would keep the memory until the garbage collector comes.
    if not isinstance(value, _Place):
        return rebuild(value, partial(_restore, memory=memory, copy=copy))
    tensor = _view(memory, value.offset, value.shape, value.dtype)
    tensor = tensor.clone() if copy else tensor
    return tensor.numpy() if value.is_numpy else tensor


def rebuild(value: Any, visit: Callable[[Any], Any]) -> Any:
    """The same container with every item visited; anything that is no container as it is."""
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(visit(item) for item in value)
    if type(value) in (list, tuple):
        return type(value)(visit(item) for item in value)
    if type(value) is dict or (isinstance(value, Mapping) and hasattr(value, "copy") and hasattr(value, "update")):
        changed = value.copy()
        changed.update({key: visit(item) for key, item in value.items()})
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: visit(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


def _view(memory: _Memory | None, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(np.prod(shape, dtype=np.int64))
    if memory is None or not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
