"""PyTorch's fused optimizers: one kernel updates all parameters.

PyTorch does not choose them by default. On a CPU its default updates one parameter after another, which takes two to
four times as long for a small model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

logger = logging.getLogger("paceline")

_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_DEVICES = ("cpu", "cuda")


def fuse(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Choose the fused kernels for newly built optimizers. Others are logged with the reason."""
    for optimizer in optimizers:
        reason = obstacle(optimizer)
        if reason is not None:
            logger.info("the %s is not fused: %s", type(optimizer).__name__, reason)
            continue
        for group in optimizer.param_groups:
            group["fused"] = True


def obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    """Why an optimizer is not fused; None if it can be. The user's own choice is kept."""
    if type(optimizer) not in _OPTIMIZERS:
        return "PyTorch has no fused kernel for it"
    if optimizer.state:
        return "it was used before"
    for group in optimizer.param_groups:
        for name in ("fused", "foreach"):
            if group[name] is not None:
                return f"it was made with {name}={group[name]}"
        for name in ("differentiable", "capturable"):
            if group.get(name):
                return f"it was made with {name}=True"
        for parameter in group["params"]:
            if parameter.device.type not in _DEVICES:
                return f"PyTorch has no fused kernel for parameters on {parameter.device.type}"
            if parameter.is_cpu and parameter.dtype in (torch.bfloat16, torch.float16):
                return f"PyTorch's fused kernel gives wrong results for {parameter.dtype} on a CPU"
    return None


def step_sgd(optimizer: torch.optim.SGD) -> None:
    """`optimizer.step()`. Fused SGD fails if only some parameters have momentum yet: such a group is not fused."""
    num_parameters = sum([len(group["params"]) for group in optimizer.param_groups])
    if len(optimizer.state) == num_parameters:  # all have momentum
        optimizer.step()
        return
    mixed = [group for group in optimizer.param_groups if _has_newcomers(group, optimizer.state)]
    for group in mixed:
        group["fused"] = None
    try:
        optimizer.step()
    finally:
        for group in mixed:
            group["fused"] = True


def _has_newcomers(group: dict[str, Any], state: Any) -> bool:
    if not group.get("momentum") or not group.get("fused"):
        return False
    has_momentum = {"momentum_buffer" in state.get(p, ()) for p in group["params"] if p.grad is not None}
    return len(has_momentum) > 1
