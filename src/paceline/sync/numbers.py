"""The small numbers of a step: what every worker must know beside the gradients.

They ride at the end of the last gradient bucket, so a step costs one exchange. Each number has a slot of its own
that exactly one worker fills, and the sum over workers therefore hands everybody every number unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Layout:
    """Where the numbers lie. Written on the device: losses, peaks. Written by the host: the rest."""

    num_micro_batches: int
    num_grids: int
    num_workers: int
    num_parameters: int
    num_buffers: int

    @cached_property
    def counts(self) -> tuple[int, ...]:
        m = self.num_micro_batches
        return (m, m * self.num_grids, m, self.num_workers, self.num_parameters, self.num_buffers)

    @property
    def num_device(self) -> int:
        return sum(self.counts[:2])

    @property
    def total(self) -> int:
        return sum(self.counts)


class StepNumbers:
    """The numbers of one step after the exchange; on a GPU they stay there until one is asked for.

    `on_device` is where they are then: losses first.
    """

    def __init__(self, layout: Layout, source: list[float] | torch.Tensor) -> None:
        self._layout = layout
        self._source = source
        self.on_device = source if isinstance(source, torch.Tensor) else None

    @classmethod
    def from_tail(cls, layout: Layout, tail: torch.Tensor) -> StepNumbers:
        # The tail is overwritten by the next step. On the CPU, reading it now is cheaper than copying it.
        return cls(layout, tail.tolist() if tail.device.type == "cpu" else tail.clone())

    @cached_property
    def _parts(self) -> list[list[float]]:
        values = self._source if isinstance(self._source, list) else self._source.tolist()
        parts, start = [], 0
        for count in self._layout.counts:
            parts.append(values[start : start + count])
            start += count
        return parts

    @property
    def losses(self) -> list[float]:
        """Per micro-batch, as the user reported it; 0 where nothing was reported."""
        return self._parts[0]

    @property
    def weights(self) -> list[float]:
        return self._parts[2]

    @property
    def seconds(self) -> list[float]:
        """What each worker spent on its micro-batches, waiting for data included."""
        return self._parts[3]

    @property
    def used(self) -> list[float]:
        """How many workers have a gradient for each parameter."""
        return self._parts[4]

    @property
    def changed_buffers(self) -> list[float]:
        return self._parts[5]

    def peaks(self, grid: int) -> list[float]:
        """The largest magnitude that each micro-batch added to this grid's buffer, before weighting."""
        m = self._layout.num_micro_batches
        return self._parts[1][grid * m : (grid + 1) * m]

    @property
    def total_weight(self) -> float:
        return sum(self.weights)

    @property
    def loss(self) -> float:
        """The weighted mean, added up in the order of the micro-batches; NaN if nothing had weight."""
        total = self.total_weight
        return sum(w * x for w, x in zip(self.weights, self.losses, strict=True)) / total if total else float("nan")


def pad(values: Sequence[float], count: int) -> list[float]:
    """`values` followed by zeros: a step at the end of an epoch fills only part of the slots."""
    return [*values, *([0.0] * (count - len(values)))]


class OneLoss:
    """The numbers of a world of one with one micro-batch: they need no layout and no exchange."""

    changed_buffers: tuple[float, ...] = ()

    def __init__(self, loss: torch.Tensor | None, weight: float, seconds: float) -> None:
        if not weight:
            loss = None  # a mean over nothing, 0/0 perhaps
        on_cpu = loss is None or loss.device.type == "cpu"
        self.on_device = None if on_cpu else loss
        self.total_weight = weight
        self.weights = [weight]
        self.seconds = [seconds]
        self._loss = 0.0 if loss is None else loss.item() if on_cpu else loss

    @property
    def loss(self) -> float:
        if not self.total_weight:
            return float("nan")
        if isinstance(self._loss, torch.Tensor):
            self._loss = self._loss.item()
        return self._loss

    @property
    def losses(self) -> list[float]:
        return [self.loss if self.total_weight else 0.0]
