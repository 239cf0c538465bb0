"""Gradients that are exchanged in every step, in fewer bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.base import DONE, Pending
from paceline.core.seeding import Purpose, derive_seed
from paceline.plan.shares import Plan
from paceline.sync.buffers import Buffers
from paceline.sync.compression.exchange import WeightedSum, weighted_sum
from paceline.sync.compression.settings import Compression
from paceline.sync.gradients.exchange import MeanGradients, Sums
from paceline.sync.step_numbers import StepNumbers
from paceline.sync.strategy import Accept, UpdateUnless


class CompressedGradients(MeanGradients):
    """Encodes each worker's sums. Losses, weights and buffers travel as they are.

    The result depends on the number of workers: each of them rounds its own sums.
    """

    def __init__(self, *arguments: Any, compress: Compression, seed: int, **settings: Any) -> None:
        self._compress: Compression = compress
        self._seed = seed
        self._num_exchanged = 0
        # A power of two near the weight of a step, by which sums are divided on the way if that weight is not known
        # before: in fp16 they would overflow. From the first step with weight.
        self._unit: float | None = None
        # What this worker has not sent yet, by the parameters of a bucket; empty if the encoding leaves nothing.
        self._residuals: dict[tuple[str, ...], torch.Tensor] = {}
        super().__init__(*arguments, **settings)

    def _lay_out(self, parameters: Mapping[str, torch.Tensor], buffers: Buffers) -> None:
        super()._lay_out(parameters, buffers)
        self._totals = [weighted_sum(self._compress, sums.layout.numel, self._communicator) for sums in self._sums]
        self._gaps = [sums.layout.gaps(sums.flat) for sums in self._sums]
        self._set_residuals(self._residuals)

    def _set_residuals(self, known: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Zeros where nothing is known."""
        device = self._communicator.world.device
        self._residuals = {
            names: known[names] if names in known else torch.zeros(sums.layout.numel, device=device)
            for names, sums, total in zip(self._bucket_names, self._sums, self._totals, strict=True)
            if total.keeps_residual
        }
        self._next_residuals: dict[tuple[str, ...], torch.Tensor] = {}

    @property
    def _bucket_names(self) -> list[tuple[str, ...]]:
        return [tuple(sums.layout.names) for sums in self._sums]

    def begin_step(self, plan: Plan, **weights: Any) -> None:
        super().begin_step(plan, **weights)
        self._own_weight = 0
        self._has_unit = self._must_divide and self._compress == "fp16"
        self._unit_of_step = self._unit if self._has_unit else 1.0

    def begin_micro_batch(self, number: int, weight: int, *, is_last: bool) -> None:
        self._own_weight += weight
        super().begin_micro_batch(number, weight, is_last=is_last)

    def _find_unit(self) -> float:
        """All workers take part, when each has begun its last micro-batch."""
        weight = torch.tensor([self._own_weight], dtype=torch.float64, device=self._communicator.world.device)
        self._communicator.all_reduce(weight).wait()
        return math.ldexp(1.0, math.frexp(weight.item())[1])

    def _start(self, sums: Sums) -> Pending:
        if self._unit_of_step is None:
            self._unit_of_step = self._find_unit()
        number, numel, names = len(self._pending), sums.layout.numel, tuple(sums.layout.names)
        gradients, others, total = sums.flat[:numel], sums.flat[numel:], self._totals[number]
        if self._gaps[number]:
            torch._foreach_zero_(self._gaps[number])  # a step in which fp16 overflowed leaves NaN there
        residual = None
        if total.keeps_residual:
            # A copy: the step may be abandoned and repeated.
            self._next_residuals[names] = residual = self._residuals[names].clone()
        rank = self._communicator.world.rank
        seed = derive_seed(self._seed, Purpose.COMPRESSION, self._num_exchanged, rank, number)
        total.start(gradients.to(torch.float32), 1.0 / self._unit_of_step, seed, residual)
        pending = self._communicator.all_reduce(others) if len(others) else DONE
        return _PendingSum(total, gradients, pending, self._communicator.world.size, self._unit_of_step)

    def finish(self, accept: Accept = lambda _: True, update_unless: UpdateUnless | None = None) -> StepNumbers | None:
        numbers = super().finish(accept, update_unless)
        if numbers is not None:
            self._num_exchanged += 1
            if self._has_unit and self._unit is None and numbers.total_weight:
                self._unit = self._unit_of_step
            if self._residuals:
                # A step that is not finite is skipped: fp16 overflowed.
                is_finite = torch.stack([sums.flat.sum().isfinite() for sums in self._sums]).all()
                for names, residual in self._residuals.items():
                    self._residuals[names] = torch.where(is_finite, self._next_residuals[names], residual)
        return numbers

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_exchanged": self._num_exchanged, "unit": self._unit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Residuals begin with zeros."""
        super().load_state_dict(state)
        self._num_exchanged = state.get("num_exchanged", 0)
        self._unit = state.get("unit")
        self._set_residuals({})

    def residuals(self) -> list[torch.Tensor] | None:
        """What this worker has not sent yet, by bucket; None if there is nothing."""
        return list(self._residuals.values()) or None

    def load_residuals(self, saved: list[torch.Tensor] | None) -> None:
        sizes = [sums.layout.numel for sums in self._sums]
        known: dict[tuple[str, ...], torch.Tensor] = {}
        # Cut anew: the buckets on another kind of device have other sizes.
        if saved and sum(sizes) == sum(map(len, saved)):
            values = torch.cat(saved).to(self._communicator.world.device)
            known = dict(zip(self._bucket_names, values.split(sizes), strict=True))
        self._set_residuals(known)


@dataclass(frozen=True)
class _PendingSum:
    total: WeightedSum
    gradients: torch.Tensor
    others: Pending
    num_workers: int
    unit: float

    def wait(self) -> None:
        self.others.wait()
        self.gradients.copy_(self.total.finish([1.0 / self.unit] * self.num_workers, self.unit))
