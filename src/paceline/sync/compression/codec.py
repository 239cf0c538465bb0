"""The interface of an encoding, and the encodings by name.

An encoding turns a flat float32 tensor into bytes of a known number. Decoding is a function of the bytes alone, so all
workers that decode the same bytes get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from paceline.sync.compression.quantize import BlockQuantizer
from paceline.sync.compression.sparse import TopK


class Codec(Protocol):
    """An encoding. `keeps_residual`: it is biased, so what was not sent must be added to the next values."""

    keeps_residual: bool

    def num_bytes(self, numel: int) -> int:
        """The size of an encoded tensor with `numel` elements."""

    def encode(self, values: torch.Tensor, seed: int, packed: torch.Tensor) -> None:
        """Write the bytes for a flat float32 tensor to `packed`. `seed` determines how values are rounded."""

    def add_decoded(self, packed: torch.Tensor, weight: float, to: torch.Tensor) -> None:
        """Add `weight` times the decoded values. A block with an inf or NaN is not finite."""


# Values in these are added up on the way.
SUMMED: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CODECS: dict[str, Callable[[], Codec]] = {
    "int8": partial(BlockQuantizer, 8),
    "int4": partial(BlockQuantizer, 4),
    "sparse": TopK,
}
