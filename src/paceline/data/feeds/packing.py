"""Batches between processes: pickled into a memory file, with tensors and arrays in separate, aligned blocks."""

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


def pack(batch: Any) -> tuple[list[int], int]:
    """The sizes of the blocks, of which the first is the pickle, and the file's descriptor, which the caller closes."""
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, 5, buffer_callback=buffers.append).dump(batch)
    blocks = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = [block.nbytes for block in blocks]
    *starts, end = _starts(sizes)
    descriptor = os.memfd_create("paceline-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, end)
        with mmap.mmap(descriptor, end) as memory:
            for start, block in zip(starts, blocks, strict=True):
                memory[start : start + block.nbytes] = block
    except BaseException:
        os.close(descriptor)
        raise
    return sizes, descriptor


def unpack(sizes: list[int], descriptor: int) -> Any:
    """The batch that `pack` packed. Closes the descriptor.

    The tensors of a large batch are views of the shared memory, which is released with the last of them.
    """
    *starts, end = _starts(sizes)
    try:
        memory = memoryview(mmap.mmap(descriptor, end))
    finally:
        os.close(descriptor)
    pickled, *blocks = (memory[start : start + size] for start, size in zip(starts, sizes, strict=True))
    return pickle.loads(pickled, buffers=map(_copied, blocks) if end <= MAX_COPIED_BYTES else blocks)


def _starts(sizes: list[int]) -> list[int]:
    """Where blocks of these sizes start in the file, and its end."""
    return list(accumulate((-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes), initial=0))


def _copied(block: memoryview) -> Any:
    """A copy in memory that torch allocated, so that it is aligned."""
    copy = torch.empty(block.nbytes, dtype=torch.uint8).numpy()
    copy[:] = np.frombuffer(block, np.uint8)
    return copy
