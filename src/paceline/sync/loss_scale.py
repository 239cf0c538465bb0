"""fp16 loss scaling: the loss is multiplied before backward, so that small gradients do not underflow."""

from __future__ import annotations

from collections.abc import Mapping

# Below 1 for losses whose gradients are too large for fp16 as they are.
LEAST = 2.0**-24


class LossScale:
    """A power of two that grows while gradients are finite and halves when they overflow.

    Always a power of two, so that scaling and unscaling round nothing. num_skipped: steps in a row that were not
    finite.
    """

    def __init__(self, initial: float = 65536.0, growth_interval: int = 2000) -> None:
        self.value = initial
        self._growth_interval = growth_interval
        self._steps_since_change = 0
        self.num_skipped = 0

    def update(self, *, is_loss_finite: bool, is_gradient_finite: bool) -> None:
        """Call once per step, with the same values on every worker. A loss is not finite at any scale."""
        if not (is_loss_finite and is_gradient_finite):
            self.num_skipped += 1
            self._steps_since_change = 0
            if is_loss_finite:
                self.value = max(self.value / 2.0, LEAST)
            return
        self.num_skipped = 0
        self._steps_since_change += 1
        if self._steps_since_change == self._growth_interval:
            self.value *= 2.0
            self._steps_since_change = 0

    def state_dict(self) -> dict[str, float]:
        return {
            "value": self.value,
            "steps_since_change": self._steps_since_change,
            "num_skipped": self.num_skipped,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = state["value"]
        self._steps_since_change = int(state["steps_since_change"])
        self.num_skipped = int(state.get("num_skipped", 0))  # older checkpoints have none
