"""A value as one block of bytes, for another process: JSON and the bytes of its tensors, so no pickle is loaded.

The length of a header, the header, and the tensors, each from an aligned place on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from paceline.core.tree import DTYPE_NAMES, DTYPES, StructureError, flatten, unflatten

# A micro-batch's tensors start on a cache line: on unaligned inputs some kernels give other results.
_ALIGNMENT_BYTES = 64
_LENGTH_BYTES = 8


def encode(value: Any, name: str, *, with_classes: bool = False) -> torch.Tensor:
    """The message; see `tree.flatten`, also for what raises TypeError."""
    flat = flatten(value, name, with_classes=with_classes)
    kinds = [(name, DTYPE_NAMES[tensor.dtype], list(tensor.shape)) for name, tensor in flat.tensors.items()]
    header = json.dumps({"structure": flat.structure, "tensors": kinds}).encode()
    header = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    places = _places(len(header), [tensor.nbytes for tensor in flat.tensors.values()])
    message = torch.empty(places[-1], dtype=torch.uint8)
    message[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for place, tensor in zip(places, flat.tensors.values(), strict=False):
        _view(message, place, tensor.dtype, tensor.shape).copy_(tensor)
    return message


def decode(message: torch.Tensor) -> Any:
    """The value in a message, whose memory its tensors share. StructureError for what `encode` cannot have written."""
    end = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES].numpy().tobytes(), "little")
    try:
        header = json.loads(message[_LENGTH_BYTES:end].numpy().tobytes())
        kinds = [(name, DTYPES[dtype], torch.Size(shape)) for name, dtype, shape in header["tensors"]]
        places = _places(end, [shape.numel() * dtype.itemsize for _, dtype, shape in kinds])
        tensors = {
            name: _view(message, place, dtype, shape)
            for place, (name, dtype, shape) in zip(places, kinds, strict=False)
        }
        structure = header["structure"]
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise StructureError(f"the message is not one that was sent: {error}") from None
    return unflatten(structure, tensors, with_classes=True)


def _places(start: int, sizes: Sequence[int]) -> list[int]:
    """Where each tensor begins, after `start` bytes, and where the last one ends."""
    return list(accumulate((_aligned(size) for size in sizes), initial=_aligned(start)))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _view(message: torch.Tensor, place: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return message[place : place + shape.numel() * dtype.itemsize].view(dtype).view(shape)
