"""The micro-batches before capture: they do one-time work, and show whether capture would pay."""

from __future__ import annotations

from collections.abc import Callable

from paceline.run.capture.graphs import Graphs, Made, Seconds

NUM_UNTIMED = 3
NUM_TIMED = 3
# Ratio of device time to launch time up to which the device waits for the host. Above it a graph gains nothing.
LAUNCH_BOUND = 1.25


class WarmUp:
    """Runs these micro-batches. Afterwards `obstacle` is the reason not to capture, if any."""

    def __init__(self, graphs: Graphs, *, is_judged: bool) -> None:
        self.obstacle: str | None = None
        self._graphs = graphs
        self._num_timed = NUM_TIMED if is_judged else 0
        self._num_run = 0
        self._seconds: list[Seconds] = []

    @property
    def is_done(self) -> bool:
        return self._num_run >= NUM_UNTIMED + self._num_timed

    def __call__(self, work: Callable[[], Made]) -> Made:
        self._num_run += 1
        if self._num_run <= NUM_UNTIMED:
            return work()
        made, seconds = self._graphs.timed(work)
        self._seconds.append(seconds)
        if len(self._seconds) == self._num_timed:
            self.obstacle = _judged(self._seconds)
        return made


def _judged(measured: list[Seconds]) -> str | None:
    seconds = sorted(measured, key=lambda s: s.device / s.host)[len(measured) // 2]
    if seconds.device <= LAUNCH_BOUND * seconds.host:
        return None
    return (
        f"the device needs {1e3 * seconds.device:.2f} ms for a micro-batch that is launched in "
        f"{1e3 * seconds.host:.2f} ms, so it does not wait for the host"
    )
