"""Integers of 8 or 4 bits with one scale per block, rounded at random so that the mean error is zero."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Literal

import torch

BLOCK = 256  # values per scale: the scales add an eighth of a bit to each value
SCALE_BYTES = 4
CHUNK = 1 << 18  # values encoded in one pass on a CPU, so that they stay in its cache
NUM_OFFSETS = 1 << 16  # of the random numbers


class BlockQuantizer:
    """Multiples of a block's scale, from -levels to levels. The scale maps the block's largest magnitude to `levels`.

    A value between two multiples becomes the upper one with a probability equal to its distance from the lower one.
    """

    keeps_residual = False  # unbiased

    def __init__(self, bits: Literal[4, 8]) -> None:
        self._bits = bits
        self.levels = 2 ** (bits - 1) - 1
        self._scratch = torch.empty(2, 0, BLOCK)

    def num_bytes(self, numel: int) -> int:
        return num_blocks(numel, BLOCK) * (SCALE_BYTES + BLOCK * self._bits // 8)

    def encode(self, values: torch.Tensor, seed: int, packed: torch.Tensor) -> None:
        all_numbers, all_scales = self._sections(packed, values.numel())
        for first, end in _chunks(values):
            numbers, scales = all_numbers[first:end], all_scales[first:end]
            levels, padded = self._empty(end - first, values.device)
            blocks = in_blocks(values[first * BLOCK : end * BLOCK], BLOCK, out=padded.view(-1))
            torch.amax(torch.abs(blocks, out=levels), dim=1, keepdim=True, out=scales)
            scales.div_(self.levels)
            # A block of zeros has the scale 0: divided by 1 it stays zero.
            divisors = scales.masked_fill(scales == 0, 1.0)
            noise = _noise(values.device, seed + first * BLOCK, blocks.numel()).view_as(blocks)
            # An inf or NaN may become any number: its scale is not finite either.
            torch.addcdiv(noise, blocks, divisors, out=levels).floor_().clamp_(-self.levels, self.levels)
            if self._bits == 4:
                low, high = levels.chunk(2, dim=1)
                levels = low.add_(high, alpha=16)
            numbers.copy_(levels)

    def add_decoded(self, packed: torch.Tensor, weight: float, to: torch.Tensor) -> None:
        all_numbers, all_scales = self._sections(packed, to.numel())
        for first, end in _chunks(to):
            part, numbers = to[first * BLOCK : end * BLOCK], all_numbers[first:end]
            levels, _ = self._empty(end - first, to.device)
            if self._bits == 8:
                levels.copy_(numbers)
            else:
                low, high = levels.chunk(2, dim=1)
                numbers_high = (numbers + 8) >> 4
                high.copy_(numbers_high)
                low.copy_(numbers.sub(numbers_high, alpha=16))
            part.add_(levels.mul_(all_scales[first:end] * weight).view(-1)[: len(part)])

    def _empty(self, count: int, device: torch.device) -> torch.Tensor:
        """Two sets of uninitialized blocks, in memory that is reused: page faults would take longer than the rest."""
        if self._scratch.shape[1] < count or self._scratch.device != device:
            self._scratch = torch.empty(2, count, BLOCK, device=device)
        return self._scratch[:, :count]

    def _sections(self, packed: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers and the scales, by block."""
        count = num_blocks(numel, BLOCK)
        numbers, scales = packed.split([count * BLOCK * self._bits // 8, count * SCALE_BYTES])
        return numbers.view(torch.int8).view(count, -1), scales.view(torch.float32).view(count, 1)


def in_blocks(values: torch.Tensor, size: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """The values as rows of `size`. If the last row must be padded with zeros, all are copied, to `out` if given."""
    missing = -values.numel() % size
    if missing or not values.numel():
        values = torch.cat([values, values.new_zeros(missing or size)], out=out)
    return values.view(-1, size)


def num_blocks(numel: int, size: int) -> int:
    return max(1, -(-numel // size))


def _chunks(values: torch.Tensor) -> list[tuple[int, int]]:
    """The ranges of blocks, of equal size, that are computed in one pass; on a GPU one range."""
    total = num_blocks(values.numel(), BLOCK)
    count = -(-total * BLOCK // CHUNK) if values.device.type == "cpu" else 1
    return list(pairwise(total * number // count for number in range(count + 1)))


def _noise(device: torch.device, start: int, numel: int) -> torch.Tensor:
    """Numbers from 0 to 1, from a sequence that repeats endlessly. Drawing them would take longer than the rest."""
    table, start = _noise_table(device), start % NUM_OFFSETS
    if start + numel > len(table):
        table = table.repeat(-(-(start + numel) // len(table)))
    return table[start : start + numel]


@cache
def _noise_table(device: torch.device) -> torch.Tensor:
    """The sequence, repeated to cover a chunk. Each number occurs once in it, so over all offsets there is no bias."""
    order = torch.randperm(NUM_OFFSETS, generator=torch.Generator().manual_seed(0))
    return order.to(torch.float32).add_(0.5).div_(NUM_OFFSETS).repeat(1 + CHUNK // NUM_OFFSETS).to(device)
