"""The layout of gradients in flat buffers.

A bucket is one contiguous buffer for the gradients of some parameters, which are exchanged together. Each parameter
starts at a block border, so that a block belongs to one parameter: exact sums use one constant per block. An empty
parameter has a block too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

# A multiple of a cache line in every dtype: kernels choose other paths, with other rounding, for unaligned memory.
BLOCK_NUMEL = 128


class BucketLayout:
    """The parameters of one bucket, all of one dtype, and their offsets in a flat buffer of `numel` elements.

    first: the index of its first parameter in all buckets. offsets: of the parameters, in elements.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], first: int) -> None:
        self.first = first
        self.slice = slice(first, first + len(parameters))  # of its parameters among all buckets
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.dtype = self.parameters[0].dtype
        self.device = self.parameters[0].device
        sizes = [max(-(-parameter.numel() // BLOCK_NUMEL), 1) for parameter in self.parameters]
        ends = np.cumsum(sizes)
        self.num_blocks = int(ends[-1])
        self.numel = self.num_blocks * BLOCK_NUMEL
        self.offsets: list[int] = ((ends - sizes) * BLOCK_NUMEL).tolist()
        # By block: the index of its parameter within the bucket.
        self.owner_of_block = np.repeat(np.arange(len(sizes)), sizes)
        self.first_blocks = (ends - sizes).astype(np.intp)

    def __len__(self) -> int:
        return len(self.parameters)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's view of a flat buffer, with the parameter's shape and strides."""
        return [
            torch.as_strided(flat, p.shape, _dense_strides(p), flat.storage_offset() + offset)
            for p, offset in zip(self.parameters, self.offsets, strict=True)
        ]

    def gaps(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a flat buffer between the parameters."""
        ends = [*self.offsets[1:], self.numel]
        starts = [offset + p.numel() for offset, p in zip(self.offsets, self.parameters, strict=True)]
        return [flat[start:end] for start, end in zip(starts, ends, strict=True) if start < end]

    def peaks(self, peak_of_part: np.ndarray, first_parts: np.ndarray | None = None) -> np.ndarray:
        """Each parameter's maximum over its parts, which are the last dimension; NaN if there is a NaN.

        first_parts: the index of the first part of each parameter. Default: the parts are the blocks.
        """
        firsts = self.first_blocks if first_parts is None else first_parts
        peaks: np.ndarray = np.maximum.reduceat(peak_of_part, firsts, axis=-1, dtype=np.float64)
        return peaks


def cut_into_buckets(parameters: Mapping[str, torch.Tensor], bucket_bytes: float) -> list[BucketLayout]:
    """Buckets in the order in which backward completes them: the last parameters first."""
    groups: list[dict[str, torch.Tensor]] = []
    size, dtype = bucket_bytes, None
    for name, parameter in reversed(list(parameters.items())):
        if size >= bucket_bytes or parameter.dtype != dtype:
            groups.append({})
            size, dtype = 0.0, parameter.dtype
        groups[-1][name] = parameter
        size += parameter.numel() * parameter.element_size()
    firsts = np.cumsum([0, *map(len, groups)]).tolist()
    return [BucketLayout(group, first) for group, first in zip(groups, firsts, strict=False)]


def sum_dtype(parameters: Sequence[torch.Tensor]) -> torch.dtype:
    """Float32 for half precision, which is too coarse for sums; otherwise the parameters' dtype."""
    return torch.float64 if parameters[0].dtype == torch.float64 else torch.float32


def _dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's memory layout without gaps, which fused optimizers expect of its gradient."""
    return torch.empty_like(parameter, device="meta").stride()


def memory_order(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of each dimension that has more than one element."""
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
