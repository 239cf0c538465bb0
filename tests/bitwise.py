"""Whether two states are equal in every type and bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch


def same(a: Any, b: Any) -> bool:
    """Equal in every type and bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        as_bytes = [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return same(list(a), list(b)) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.generic):
        return a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)
