"""Optimizers that update all parameters in one kernel, where torch has one.

torch leaves this to the user, who has to know that it exists: on a CPU it updates one parameter after another unless
told otherwise, which for a small model takes two to four times as long.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

logger = logging.getLogger("paceline")

_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_DEVICES = ("cpu", "cuda")


def fuse(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Have fused kernels update the parameters; where that cannot be, the log says why, and nothing changes."""
    for optimizer in optimizers:
        reason = obstacle(optimizer)
        if reason is not None:
            logger.info("the %s is not fused: %s", type(optimizer).__name__, reason)
            continue
        for group in optimizer.param_groups:
            group["fused"] = True


def obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    """Why an optimizer cannot be fused; None if it can. What its user has chosen stays as it is."""
    if type(optimizer) not in _OPTIMIZERS:
        return "torch has no such kernel for it"
    if optimizer.state:
        return "it has been used before, and goes on as it began"
    for group in optimizer.param_groups:
        for name in ("fused", "foreach"):
            if group[name] is not None:
                return f"it was made with {name}={group[name]}"
        for name in ("differentiable", "capturable"):
            if group.get(name):
                return f"it was made with {name}=True"
        for parameter in group["params"]:
            if parameter.device.type not in _DEVICES:
                return f"torch has no such kernel for parameters on {parameter.device.type}"
            if parameter.is_cpu and parameter.dtype in (torch.bfloat16, torch.float16):
                return f"torch's kernel gives wrong results for {parameter.dtype} on a CPU"
    return None
