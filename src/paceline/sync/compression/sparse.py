"""The largest values only: 1 in 32, each in 16 bits. The rest stays in a residual."""

from __future__ import annotations

import torch

from paceline.sync.compression.quantize import in_blocks, num_blocks

BLOCK = 4096  # a position in it takes 12 bits; the other 4 hold the value
PER_BLOCK = 128
LEVELS = 7
SCALE_BYTES = 4


class TopK:
    """The 128 largest magnitudes of each block of 4096, as multiples of a scale from -7 to 7, rounded to the nearest.

    Biased: small values are not sent until they have added up in the residual.
    """

    keeps_residual = True

    def num_bytes(self, numel: int) -> int:
        return num_blocks(numel, BLOCK) * (SCALE_BYTES + 2 * PER_BLOCK)

    def encode(self, values: torch.Tensor, seed: int, packed: torch.Tensor) -> None:
        blocks = in_blocks(values, BLOCK)
        # NaN counts as larger than everything: it is sent, and not hidden.
        largest = blocks.abs().topk(PER_BLOCK, dim=1, sorted=False).indices
        chosen = blocks.gather(1, largest)
        scales = chosen.abs().amax(dim=1, keepdim=True).div_(LEVELS)
        numbers = chosen.div_(torch.where(scales == 0, 1.0, scales)).round_().nan_to_num_(0.0).clamp_(-LEVELS, LEVELS)
        entries = (largest << 4 | numbers.to(torch.int64) + 8).to(torch.int32)
        parts = torch.stack([entries & 255, entries >> 8], dim=-1).to(torch.uint8)
        torch.cat([parts.view(-1), scales.view(torch.uint8).view(-1)], out=packed)

    def add_decoded(self, packed: torch.Tensor, weight: float, to: torch.Tensor) -> None:
        count = num_blocks(to.numel(), BLOCK)
        scales = packed[-count * SCALE_BYTES :].view(torch.float32).view(count, 1)
        parts = packed[: -count * SCALE_BYTES].view(count, PER_BLOCK, 2).to(torch.int64)
        entries = parts[..., 0] | parts[..., 1] << 8
        values = (entries & 15).sub_(8).to(torch.float32).mul_(scales)
        blocks = torch.zeros(count, BLOCK, device=packed.device)
        to.add_(blocks.scatter_(1, entries >> 4, values).view(-1)[: to.numel()], alpha=weight)
