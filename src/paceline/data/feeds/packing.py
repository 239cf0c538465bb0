"""Batches between processes: pickled, with the memory of tensors and arrays beside the pickle in one shared block."""

from __future__ import annotations

import io
import mmap
import os
import pickle
from itertools import accumulate
from typing import Any

import numpy as np
import torch

# Tensors of a micro-batch start on a cache line: some kernels give other results on unaligned inputs.
ALIGNMENT_BYTES = 64
# Up to this size a copy costs less than a mapping, and a batch that the user keeps does not hold a file open.
MAX_COPIED_BYTES = 1 << 20


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_quantized:
            return NotImplemented
        tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        return _restored_tensor, (pickle.PickleBuffer(content), tensor.dtype, tuple(tensor.shape))


def _restored_tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(shape)


def pack(batch: Any) -> tuple[bytes, int | None]:
    """The pickled batch, and the descriptor of a memory file with its tensors, or None if it has none.

    The caller closes the descriptor.
    """
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, 5, buffer_callback=buffers.append).dump(batch)
    contents = [buffer.raw() for buffer in buffers]
    starts = _starts([content.nbytes for content in contents])
    message = pickle.dumps((stream.getvalue(), [content.nbytes for content in contents]))
    if not starts[-1]:
        return message, None
    descriptor = os.memfd_create("paceline-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, starts[-1])
        with mmap.mmap(descriptor, starts[-1]) as memory:
            for start, content in zip(starts, contents, strict=False):
                memory[start : start + content.nbytes] = content
    except BaseException:
        os.close(descriptor)
        raise
    return message, descriptor


def unpack(message: bytes, descriptor: int | None) -> Any:
    """The batch that `pack` packed. Closes `descriptor`.

    The tensors of a large batch are views of the shared memory, which is released with the last of them.
    """
    pickled, sizes = pickle.loads(message)
    if descriptor is None:
        return pickle.loads(pickled, buffers=[bytearray() for _ in sizes])
    try:
        total = os.fstat(descriptor).st_size
        memory = memoryview(mmap.mmap(descriptor, total))
    finally:
        os.close(descriptor)
    parts = [memory[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=False)]
    return pickle.loads(pickled, buffers=[_copied(part) for part in parts] if total <= MAX_COPIED_BYTES else parts)


def _starts(sizes: list[int]) -> list[int]:
    """Where buffers of these sizes start in the block, and its end."""
    return list(accumulate((-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes), initial=0))


def _copied(part: memoryview) -> Any:
    """A copy in memory that torch allocated, so that it is aligned."""
    copy = torch.empty(part.nbytes, dtype=torch.uint8).numpy()
    copy[:] = np.frombuffer(part, np.uint8)
    return copy
