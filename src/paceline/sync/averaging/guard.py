"""A guard against replicas that drift apart between averages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

MEMORY = 5
RISES = 3


class DivergenceGuard:
    """Detects drift that has risen three times in a row and exceeds the threshold.

    The drift is the distance of replicas from their mean, relative to its length. The count restarts after an alarm,
    so that the reaction has time to take effect.
    """

    def __init__(self, threshold: float) -> None:
        if not threshold > 0:
            raise ValueError(f"divergence_threshold={threshold}: choose a relative drift > 0, or None for no guard")
        self._threshold = threshold
        self._drifts: deque[float] = deque(maxlen=MEMORY)

    @property
    def drifts(self) -> list[float]:
        """The recent drifts, for checkpoints."""
        return list(self._drifts)

    @drifts.setter
    def drifts(self, values: Sequence[float]) -> None:
        self._drifts = deque(values, maxlen=MEMORY)

    def is_alarmed_by(self, drift: float) -> bool:
        self._drifts.append(drift)
        last = list(self._drifts)[-(RISES + 1) :]
        is_rising = len(last) == RISES + 1 and all(a < b for a, b in pairwise(last))
        if not (is_rising and drift > self._threshold):
            return False
        self._drifts.clear()
        return True
