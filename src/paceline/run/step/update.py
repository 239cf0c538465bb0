"""The update that follows the exchange, the same on every worker: clipping and the optimizers' step."""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.run.step.replica import Replica


class Number(Protocol):
    """A tensor with one number, or a number on its way to the host."""

    def item(self) -> float: ...


class Update:
    """Clips the mean gradient and steps the optimizers. max_norm: None disables clipping, inf only measures."""

    def __init__(self, replica: Replica, max_norm: float | None) -> None:
        self._replica = replica
        self._max_norm = max_norm

    def clip(self) -> Number | None:
        """Returns the norm before clipping."""
        return self._clip()

    def _clip(self) -> torch.Tensor | None:
        if self._max_norm is None:
            return None
        parameters = [p for p in self._replica.parameters.values() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)

    def step(self) -> None:
        self._replica.step_optimizers()

    @property
    def can_be_voided(self) -> bool:
        """Whether `clip_and_step_unless` is available: fused Adam and AdamW take a flag on the device."""
        return all(
            type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(g["fused"] for g in optimizer.param_groups)
            for optimizer in self._replica.optimizers
        )

    def clip_and_step_unless(self, is_void: torch.Tensor) -> Number | None:
        """Queue the whole update before the host knows whether the step counts: 1.0 in `is_void` makes it a no-op."""
        norm = self._clip()
        optimizers = self._replica.optimizers
        for optimizer in optimizers:
            optimizer.found_inf = is_void  # type: ignore[attr-defined]  # as torch.amp.GradScaler does
        try:
            self._replica.step_optimizers()
        finally:
            for optimizer in optimizers:
                del optimizer.found_inf  # type: ignore[attr-defined]
        return norm
