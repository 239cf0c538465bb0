"""End a run when a metric stops improving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from paceline.core.settings import check_value


class EarlyStopping:
    """Counts the values in a row that did not improve a metric.

        early_stopping = pl.EarlyStopping(patience=3)
        trainer.register("early_stopping", early_stopping)  # with checkpoints: a resumed run continues counting
        for epoch in trainer.epochs(100):
            ...
            if early_stopping.is_over(trainer.evaluate(validation, eval_fn)):
                break

    All workers must pass the same value, as `trainer.evaluate` returns, since they must leave together.

    patience: number of values in a row without improvement that end the run. min_delta: the least improvement over the
    best value. mode: "min" if lower is better, "max" if higher. NaN is never an improvement.
    """

    def __init__(self, patience: int = 3, min_delta: float = 0.0, mode: Literal["min", "max"] = "min") -> None:
        check_value("patience", patience, int, least=1)
        check_value("min_delta", min_delta, float, least=0)
        check_value("mode", mode, Literal["min", "max"])
        self._patience = patience
        self._min_delta = min_delta
        self._sign = 1 if mode == "max" else -1
        self.best: float | None = None
        self.num_bad = 0

    def is_over(self, value: float) -> bool:
        """Add the metric's next value. Returns whether the last `patience` values brought no improvement."""
        value = float(value)
        is_better = self.best is None or self._sign * (value - self.best) > self._min_delta
        if is_better and not math.isnan(value):
            self.best = value
            self.num_bad = 0
        else:
            self.num_bad += 1
        return self.num_bad >= self._patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.num_bad = state["best"], state["num_bad"]
