"""The norm of the gradient, bitwise independent of how the gradient is divided among workers.

The norm of a parameter's gradient is the norm of its segments' norms, and the total is the norm of the parameters'
norms. For parameters of one segment this equals torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.plan import sharding
from paceline.sync.gradients.division import flat, is_dense


def segment_norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norms of the segments of all gradients. Each gradient begins at the border of a segment."""
    segments = [
        segment for gradient in gradients for segment in _in_memory_order(gradient).split(sharding.SEGMENT_NUMEL)
    ]
    return [norm.to(_precision(norm.dtype)) for norm in torch._foreach_norm(segments)]


def num_segments(numel: int) -> int:
    return max(-(-numel // sharding.SEGMENT_NUMEL), 1)


def combined(norms: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The total norm, from the norms of all segments. counts: the number of segments by parameter."""
    by_parameter = [
        part[0] if count == 1 else torch.linalg.vector_norm(part)
        for part, count in zip(norms.split(list(counts)), counts, strict=True)
    ]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(by_parameter))
    return total


def whole_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The total norm of gradients that this worker has whole."""
    if not gradients:
        return torch.tensor(0.0)
    return combined(torch.stack(segment_norms(gradients)), [num_segments(g.numel()) for g in gradients])


def _in_memory_order(gradient: torch.Tensor) -> torch.Tensor:
    return flat(gradient) if is_dense(gradient) else gradient.reshape(-1)


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
