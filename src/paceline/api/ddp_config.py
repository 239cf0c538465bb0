"""`DdpConfig`: flodl's settings for `Trainer.setup_with`."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from paceline.core.settings import check_value
from paceline.plan.balance import hinted_speeds
from paceline.plan.cadence import Cadence
from paceline.run.config import Strategy


@dataclass(frozen=True)
class DdpConfig:
    """Settings of El Che: how workers of unequal speed exchange gradients.

    speed_hint: (slow_rank, ratio): every other worker is about `ratio` times as fast; used until measured.
    overhead_target: the overhead of exchanging gradients, as a fraction of the slowest worker's compute time.
    max_anchor: micro-batches of the slowest worker between two exchanges. None: found automatically; n: fixed; 0:
        exchange after every micro-batch.
    max_grad_norm: clips the mean gradient, after dividing by the samples of all workers.
    timeline: folder to record a timeline of the run in; `paceline timeline FOLDER` shows it.
    """

    speed_hint: tuple[int, float] | None = None
    overhead_target: float = 0.10
    max_anchor: int | None = None
    max_grad_norm: float | None = None
    timeline: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_value("max_anchor", self.max_anchor, int | None, least=0)
        _ = self.strategy  # checks its settings

    @property
    def strategy(self) -> Strategy:
        if self.max_anchor == 0:
            return "gradients"
        anchors = {} if self.max_anchor is None else {"anchor": self.max_anchor, "max_anchor": self.max_anchor}
        return Cadence(overhead_target=self.overhead_target, speed_hint=self.speed_hint, **anchors)

    def speed_hints(self, num_workers: int) -> tuple[float, ...] | None:
        """The speed hints of a run without El Che."""
        if self.speed_hint is None or self.max_anchor != 0:
            return None
        return hinted_speeds(num_workers, *self.speed_hint)
