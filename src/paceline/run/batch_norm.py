"""Checks of models with BatchNorm layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.plan.epoch import Steps


def batch_norm_in_training(model: Any) -> str | None:
    """The name of the first BatchNorm layer in training mode, if there is one."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return str(name)
    return None


def explain_one_sample_tail(model: Any, steps: Steps) -> list[RemovableHandle]:
    """Add hooks that explain why BatchNorm cannot normalise a micro-batch of one sample."""

    def check(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0]
        if module.training and x.ndim > 1 and x.numel() == x.shape[1]:
            raise ValueError(
                f"the epoch of {steps.num_samples} samples ends with a micro-batch of 1 sample, and BatchNorm needs "
                "more than one value per channel: "
                f"choose another micro_batch than {steps.micro_batch}, or drop_last=True"
            )

    batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [m.register_forward_pre_hook(check) for m in modules if isinstance(m, batch_norms)]
