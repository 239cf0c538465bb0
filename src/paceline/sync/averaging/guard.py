"""A guard against replicas that drift apart between averages."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

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
        self.drifts: deque[float] = deque(maxlen=RISES + 1)

    def is_alarmed_by(self, drift: float) -> bool:
        self.drifts.append(drift)
        is_rising = len(self.drifts) > RISES and all(a < b for a, b in pairwise(self.drifts))
        if not (is_rising and drift > self._threshold):
            return False
        self.drifts.clear()
        return True
