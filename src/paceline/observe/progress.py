"""Lines that tell how a run goes: printed for good at chosen steps, and a live one on a terminal in between."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TextIO

LIVE_INTERVAL_S = 0.1
BAR_WIDTH = 30


class StepLines:
    """Prints step 1 and every `interval`-th; on a terminal also a bar that is redrawn in place.

    `interval` 0 prints nothing at all. The loss may live on a device: it is passed as a function and only called for
    what is shown.
    """

    def __init__(self, total: int, interval: int, *, label: str = "step", stream: TextIO | None = None) -> None:
        self._total = total
        self._interval = interval
        self._label = label
        self._stream = sys.stdout if stream is None else stream
        self._is_live = bool(interval) and self._stream.isatty()
        self._started = self._drawn = monotonic()

    def is_due(self, step: int) -> bool:
        """Whether `show` would print a line for this step, or redraw the bar."""
        if not self._interval:
            return False
        return step == 1 or step % self._interval == 0 or (self._is_live and self._is_stale())

    def show(self, step: int, loss: float) -> None:
        if step == 1 or step % self._interval == 0:
            self._erase()
            width = len(str(self._total))
            print(f"{self._label} {step:>{width}}/{self._total}  loss {loss:.6g}", file=self._stream, flush=True)
        if self._is_live:
            self._draw(step, loss)

    def close(self) -> None:
        self._erase()

    def _is_stale(self) -> bool:
        return monotonic() - self._drawn >= LIVE_INTERVAL_S

    def _draw(self, step: int, loss: float) -> None:
        self._drawn = monotonic()
        filled = BAR_WIDTH * step // self._total
        left_s = (self._drawn - self._started) / step * (self._total - step)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        self._stream.write(f"\r\x1b[2K[{bar}] {step}/{self._total}  loss {loss:.4g}  {left_s:.0f} s left")
        self._stream.flush()

    def _erase(self) -> None:
        if self._is_live:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
