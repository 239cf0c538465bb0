"""Time limits that a suspended process does not exceed."""

from __future__ import annotations

from time import monotonic

# The longest interval that counts between two updates.
MAX_INTERVAL_S = 0.5


class ActiveTimer:
    """Seconds in which this process was running, since `reset`. It must be updated several times a second.

    Longer intervals between updates do not count: a batch system, a container runtime or Ctrl-Z may suspend all
    processes of a run and continue them hours later.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seconds = 0.0
        self._updated_s = monotonic()

    def update(self) -> float:
        now_s = monotonic()
        self.seconds += min(now_s - self._updated_s, MAX_INTERVAL_S)
        self._updated_s = now_s
        return self.seconds
