"""End a run when a metric stops improving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal


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
        if type(patience) is not int or patience < 1:
            raise ValueError(f"patience={patience!r} must be an int >= 1")
        if not 0.0 <= min_delta < math.inf:
            raise ValueError(f"min_delta={min_delta!r} must be a finite number >= 0")
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r}: choose 'min' or 'max'")
        self._patience = patience
        self._min_delta = min_delta
        self._mode = mode
        self.best: float | None = None
        self.num_bad = 0

    def is_over(self, value: float) -> bool:
        """Add the metric's next value. Returns whether the last `patience` values brought no improvement."""
        value = float(value)
        if self._is_better(value):
            self.best = value
            self.num_bad = 0
        else:
            self.num_bad += 1
        return self.num_bad >= self._patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.num_bad = state["best"], state["num_bad"]

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return not math.isnan(value)
        gain = self.best - value if self._mode == "min" else value - self.best
        return gain > self._min_delta
