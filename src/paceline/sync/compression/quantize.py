"""Integers of 8 or 4 bits with one scale per block, rounded at random so that the mean error is zero."""

from __future__ import annotations

import torch

BLOCK = 256  # values per scale: the scales add an eighth of a bit to each value
SCALE_BYTES = 4
NOISE_BLOCKS = 256  # with random numbers of their own


class BlockQuantizer:
    """Multiples of a block's scale, from -levels to levels. The scale maps the block's largest magnitude to `levels`.

    A value between two multiples becomes the upper one with a probability equal to its distance from the lower one.
    """

    keeps_residual = False  # unbiased

    def __init__(self, bits: int) -> None:
        if bits not in (4, 8):
            raise ValueError(f"bits={bits}: choose 4 or 8")
        self._bits = bits
        self.levels = 2 ** (bits - 1) - 1

    def num_bytes(self, numel: int) -> int:
        return _num_blocks(numel) * (SCALE_BYTES + BLOCK * self._bits // 8)

    def encode(self, values: torch.Tensor, seed: int) -> torch.Tensor:
        blocks = in_blocks(values, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True).div_(self.levels)
        random = torch.Generator(values.device).manual_seed(seed)
        # Drawing would take longer than all the rest, so blocks far from each other share their random numbers.
        noise = torch.rand(min(len(blocks), NOISE_BLOCKS), BLOCK, generator=random, device=values.device)
        noise = noise.repeat(-(-len(blocks) // len(noise)), 1)[: len(blocks)]
        # A block of zeros has the scale 0: divided by 1 it stays zero.
        numbers = noise.add_(blocks / torch.where(scales == 0, 1.0, scales)).floor_()
        numbers = numbers.nan_to_num_(0.0).clamp_(-self.levels, self.levels).to(torch.int8)
        if self._bits == 8:
            packed = numbers.view(torch.uint8)
        else:
            nibbles = numbers.add_(8).view(torch.uint8).view(len(blocks), 2, -1)
            packed = nibbles[:, 0] | nibbles[:, 1] << 4
        return torch.cat([packed.reshape(-1), scales.view(torch.uint8).view(-1)])

    def decode(self, packed: torch.Tensor, numel: int) -> torch.Tensor:
        count = _num_blocks(numel)
        # Cloned: a view of bytes as floats must start at a multiple of four.
        scales = packed[-count * SCALE_BYTES :].clone().view(torch.float32).view(count, 1)
        numbers = packed[: -count * SCALE_BYTES].view(count, -1)
        if self._bits == 8:
            levels = numbers.view(torch.int8).to(torch.float32)
        else:
            levels = torch.cat([numbers & 15, numbers >> 4], dim=1).to(torch.float32).sub_(8)
        return levels.mul_(scales).view(-1)[:numel]


def in_blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """The values as rows of `size`, the last one filled up with zeros."""
    missing = -values.numel() % size
    if missing or not values.numel():
        values = torch.cat([values, values.new_zeros(missing or size)])
    return values.view(-1, size)


def _num_blocks(numel: int) -> int:
    return max(1, -(-numel // BLOCK))
