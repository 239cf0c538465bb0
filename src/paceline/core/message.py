"""A value as one block of bytes for another process: JSON and the bytes of tensors, without pickle.

Layout: the length of the header, the header (JSON), and the tensors, each aligned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline.core.tree import DTYPE_NAMES, DTYPES, flatten, unflatten

# Tensors of a micro-batch start on a cache line: some kernels give other results on unaligned inputs.
_ALIGNMENT_BYTES = 64
_LENGTH_BYTES = 8


def encode(value: Any, name: str, *, with_classes: bool = False) -> torch.Tensor:
    """The message. See `tree.flatten`, also for the values that raise TypeError."""
    flat = flatten(value, name, with_classes=with_classes)
    named: dict[int, tuple[str, torch.Tensor]] = {}  # a shared tensor once, by the name that the structure refers to
    for key, tensor in flat.tensors.items():
        named.setdefault(id(tensor), (key, tensor))
    tensors = [tensor for _, tensor in named.values()]
    kinds = [(key, DTYPE_NAMES[tensor.dtype], list(tensor.shape)) for key, tensor in named.values()]
    header = json.dumps({"structure": flat.structure, "tensors": kinds}).encode()
    header = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    ranges = list(_aligned_ranges(len(header), [tensor.nbytes for tensor in tensors]))
    message = torch.empty(ranges[-1].stop if ranges else len(header), dtype=torch.uint8)
    message[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for place, tensor in zip(ranges, tensors, strict=True):
        message[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return message


def decode(message: torch.Tensor) -> Any:
    """The value in a message, whose memory its tensors share. ValueError if `encode` cannot have written it."""
    end = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES].numpy().tobytes(), "little")
    try:
        header = json.loads(message[_LENGTH_BYTES:end].numpy().tobytes())
        kinds = [(name, DTYPES[dtype], torch.Size(shape)) for name, dtype, shape in header["tensors"]]
        ranges = _aligned_ranges(end, [shape.numel() * dtype.itemsize for _, dtype, shape in kinds])
        tensors = {
            name: message[place].view(dtype).view(shape)
            for place, (name, dtype, shape) in zip(ranges, kinds, strict=True)
        }
        structure = header["structure"]
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"the message was not written by encode: {error}") from None
    return unflatten(structure, tensors, with_classes=True)


def _aligned_ranges(start: int, sizes: Sequence[int]) -> Iterator[slice]:
    """The ranges of the tensors, after `start` bytes."""
    for size in sizes:
        start = -(-start // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        yield slice(start, start + size)
        start += size
