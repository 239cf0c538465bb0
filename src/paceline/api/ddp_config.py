"""`DdpConfig`: flodl's settings for `Trainer.setup_with`."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.balance import hinted_speeds
from paceline.plan.cadence import Cadence
from paceline.run.config import Strategy


@dataclass(frozen=True)
class DdpConfig:
    """How workers of unequal speed go on together.

    speed_hint: (slow_rank, ratio): every other worker is about `ratio` times as fast; used until measured.
    overhead_target: what exchanging gradients may cost, as a part of the slowest worker's time.
    max_anchor: None finds how many micro-batches lie between two exchanges; n fixes it at n for the slowest worker; 0
        exchanges after every micro-batch.
    max_grad_norm: of the mean gradient, after dividing by the samples of all workers.
    """

    speed_hint: tuple[int, float] | None = None
    overhead_target: float = 0.10
    max_anchor: int | None = None
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        if self.max_anchor is not None and (type(self.max_anchor) is not int or self.max_anchor < 0):
            raise ValueError(f"max_anchor={self.max_anchor!r}: choose None to find it, 0 for none, or a number >= 1")
        _ = self.strategy  # whose own checks are made now

    @property
    def strategy(self) -> Strategy:
        if self.max_anchor == 0:
            return "gradients"
        anchors = {} if self.max_anchor is None else {"anchor": self.max_anchor, "max_anchor": self.max_anchor}
        return Cadence(overhead_target=self.overhead_target, speed_hint=self.speed_hint, **anchors)

    def speed_hints(self, num_workers: int) -> tuple[float, ...] | None:
        """The hint for a run without El Che."""
        if self.speed_hint is None or self.max_anchor != 0:
            return None
        return hinted_speeds(num_workers, *self.speed_hint)
