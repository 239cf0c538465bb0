"""Settings of the averaging strategy, apart from its code: project files are checked without torch."""

# ruff: noqa: RUF009 - `setting` returns a dataclasses.field

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from paceline.core.settings import setting
from paceline.plan.cadence import Cadence
from paceline.sync.averaging.guard import DivergenceGuard

TRANSFERS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Averaging:
    """Settings of the strategy.

    every: steps between two averages, or a `Cadence` that finds the number: its overhead_target bounds the cost of
        averaging, its anchor is the initial number of steps.
    first_step: gradients are exchanged in every step until this many steps are done (post-local SGD).
    overlap: replicas train on while their mean is computed, and apply the difference at the next average. No step is
        lost.
    transfer: the dtype in which changes are sent.
    outer: an optimizer over the common weights that uses the mean change as its gradient, for example
        `lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)`; None uses the mean itself.
    divergence_threshold: relative drift above which three rises in a row halve the steps between averages; None
        disables the guard.
    """

    every: int | Cadence = setting("steps between averages, or a cadence that adjusts them", 32, least=1)
    first_step: int = setting("exchange gradients in every step until this step (post-local SGD)", 0, least=0)
    overlap: bool = setting("continue training while the average is computed", False)
    transfer: Literal["fp32", "bf16", "fp16"] = setting("data type of the transfer", "fp32")
    outer: Callable[[list[Any]], Any] | None = setting(
        "optimizer over the averaged weights, called with the parameters", None
    )
    divergence_threshold: float | None = setting("drift above which averaging becomes more frequent", 0.05, above=0)

    def __post_init__(self) -> None:
        if not isinstance(self.every, Cadence) and (type(self.every) is not int or self.every < 1):
            raise ValueError(
                f"every={self.every!r}: choose the number of steps between two averages, at least 1, or a Cadence(...)"
            )
        if isinstance(self.every, Cadence) and self.every.speed_hint is not None:
            raise ValueError("Averaging ignores Cadence(speed_hint=): give speed_hints to the run instead")
        if type(self.first_step) is not int or self.first_step < 0:
            raise ValueError(f"first_step={self.first_step!r}: choose a number of steps >= 0")
        if self.transfer not in TRANSFERS:
            raise ValueError(f"transfer={self.transfer!r} is unknown: choose one of {', '.join(TRANSFERS)}")
        if self.divergence_threshold is not None:
            DivergenceGuard(self.divergence_threshold)
