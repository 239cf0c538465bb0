"""fp16 loss scaling: the loss is multiplied before backward, so that small gradients do not underflow."""

from __future__ import annotations

from collections.abc import Mapping


class LossScale:
    """A power of two that grows while gradients are finite and halves when they overflow.

    Always a power of two, so that scaling and unscaling round nothing.
    """

    def __init__(self, initial: float = 65536.0, growth_interval: int = 2000) -> None:
        self.value = initial
        self._growth_interval = growth_interval
        self._steps_since_change = 0

    def update(self, *, is_finite: bool) -> None:
        """Call once per step, with the same value on every worker."""
        if not is_finite:
            self.value = max(self.value / 2.0, 1.0)
            self._steps_since_change = 0
            return
        self._steps_since_change += 1
        if self._steps_since_change == self._growth_interval:
            self.value *= 2.0
            self._steps_since_change = 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "steps_since_change": self._steps_since_change}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = state["value"]
        self._steps_since_change = int(state["steps_since_change"])
