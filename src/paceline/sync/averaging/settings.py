"""Settings of the averaging strategy, apart from its code: project files are checked without torch."""

# ruff: noqa: RUF009 - `setting` returns a dataclasses.field

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from paceline.core.settings import setting
from paceline.plan.cadence import Cadence
from paceline.sync.averaging.guard import DivergenceGuard
from paceline.sync.compression.settings import COMPRESSIONS, Compression


@dataclass(frozen=True)
class Averaging:
    """Settings of the strategy.

    every: steps between two averages, or a `Cadence` that finds the number: its overhead_target bounds the cost of
        averaging, its anchor is the initial number of steps. "auto" uses the `every`, `compress` and `fragments` of
        strategy="slow link", and measures link and steps; the log and an event "averaging" report the cost.
    first_step: gradients are exchanged in every step until this many steps are done (post-local SGD).
    overlap: replicas continue training while their mean is computed, and apply the difference at the next average. No
        step is lost.
    compress: how changes are sent. "bf16" and "fp16" halve the bytes, "int8" and "int4" send integers with a scale per
        256 values, rounded at random without bias. "sparse" sends the largest 1 in 32 values, 64 times fewer bytes than
        fp32, and keeps the rest for the following averages.
    fragments: the weights are averaged in so many parts, one after the other, each every `every` steps. With `overlap`
        the mean of a part is applied `every / fragments` steps later instead of `every`.
    outer: an optimizer over the common weights that uses the mean change as its gradient, for example
        `lambda params: torch.optim.SGD(params, lr=0.6, momentum=0.7, nesterov=True)`; None uses the mean itself.
    divergence_threshold: relative drift above which three rises in a row halve the steps between averages; None
        disables the guard.
    """

    every: int | Cadence | Literal["auto"] = setting(
        "steps between averages, a cadence that adjusts them, or auto as in slow link", 32, least=1
    )
    first_step: int = setting("exchange gradients in every step until this step (post-local SGD)", 0, least=0)
    overlap: bool = setting("continue training while the average is computed", False)
    compress: Compression = setting("encoding of what is sent", "fp32")
    fragments: int = setting("number of parts of the model that are averaged in turn", 1, least=1)
    outer: Callable[[list[Any]], Any] | None = setting(
        "optimizer over the averaged weights, called with the parameters", None
    )
    divergence_threshold: float | None = setting("drift above which averaging becomes more frequent", 0.05, above=0)

    def __post_init__(self) -> None:
        is_number = type(self.every) is int and self.every >= 1
        if not is_number and self.every != "auto" and not isinstance(self.every, Cadence):
            raise ValueError(
                f"every={self.every!r}: choose the number of steps between two averages, at least 1, a Cadence(...) or "
                "'auto'"
            )
        if self.every == "auto" and (self.compress, self.fragments) != ("fp32", 1):
            raise ValueError(
                f"compress={self.compress!r} and fragments={self.fragments} would be ignored: every='auto' chooses "
                "them; leave them out, or give every as a number"
            )
        if isinstance(self.every, Cadence) and self.every.speed_hint is not None:
            raise ValueError("Averaging ignores Cadence(speed_hint=): give speed_hints to the run instead")
        if type(self.first_step) is not int or self.first_step < 0:
            raise ValueError(f"first_step={self.first_step!r}: choose a number of steps >= 0")
        if self.compress not in COMPRESSIONS:
            raise ValueError(f"compress={self.compress!r} is unknown: choose one of {', '.join(COMPRESSIONS)}")
        if type(self.fragments) is not int or self.fragments < 1:
            raise ValueError(f"fragments={self.fragments!r}: choose a number of parts >= 1")
        if isinstance(self.every, int) and self.fragments > self.every:
            raise ValueError(
                f"fragments={self.fragments} is larger than every={self.every}: each part is averaged every "
                f"{self.every} steps, at most one part per step; choose fragments <= {self.every}"
            )
        if self.divergence_threshold is not None:
            DivergenceGuard(self.divergence_threshold)


def nesterov(parameters: list[Any]) -> Any:
    """The outer optimizer of "slow link": it moves once as far as the mean change, and twice as far in the long run.

    Chosen by the final loss (docs/slow-links.md): a larger immediate move leaves more of the workers' noise in the
    weights; a smaller total move slows down the start.
    """
    import torch

    return torch.optim.SGD(parameters, lr=0.6, momentum=0.7, nesterov=True, fused=True)


# The settings of strategy="slow link".
SLOW_LINK = Averaging(every="auto", overlap=True, outer=nesterov)
