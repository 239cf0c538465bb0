"""Lines that tell how a run goes: printed for good at chosen steps, and a live one on a terminal in between.

The live line is written over in one go, and the cursor is never hidden: there is nothing to flicker, and nothing to
restore on the terminal of a run that was killed.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Self, TextIO

from paceline.observe import formats
from paceline.observe.best_effort import SafeStream

LIVE_INTERVAL_S = 0.1
BAR_WIDTH = 30
# Between plain lines, where nobody chose a number of steps.
PLAIN_INTERVAL_S = 10.0
# More workers than this are shown by the smallest and the largest.
MAX_WORKERS_SHOWN = 8


class StepLines:
    """Prints step 1 and every `interval`-th; on a terminal also a bar that is redrawn in place.

    `interval` 0 prints nothing at all. The loss may live on a device: it is passed as a function and only called for
    what is shown.
    """

    def __init__(self, total: int, interval: int, *, label: str = "step", stream: TextIO | None = None) -> None:
        self._total = total
        self._interval = interval
        self._label = label
        self._stream = SafeStream(sys.stdout if stream is None else stream)
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


@dataclass(frozen=True)
class StepView:
    """What is shown of a step. `shares` and `waiting` (parts of the time) have one number per worker, or are empty."""

    step: int
    loss: float | None  # None while it is not known
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    shares: Sequence[int] = ()
    waiting: Sequence[float] = ()


class Progress:
    """Shows one run on one stream; a context manager, whose end leaves the cursor on an empty line, also on errors.

    On a terminal one live line is redrawn in place, as wide as the terminal is at that moment. Elsewhere there are
    plain lines: step 1, every `every_steps`-th (default: one every 10 seconds), and the last.
    total: steps of the run; None if nobody knows. start_step: completed steps when the run went on. quiet: show
    nothing.
    The numbers may live on a device: ask `is_due` before reading them.
    """

    def __init__(
        self,
        total: int | None,
        *,
        start_step: int = 0,
        every_steps: int | None = None,
        quiet: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps={every_steps}: choose at least 1 step between two lines, or quiet=True")
        self._total = total
        self._first_step = start_step + 1
        self._every_steps = every_steps
        self._quiet = quiet
        self._stream = SafeStream(sys.stdout if stream is None else stream)
        self._is_live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._shown_at = -math.inf
        # Where the time of a step is measured from: the first one shown, since the first step takes longer than others.
        self._origin: tuple[float, int] | None = None

    def is_due(self, step: int) -> bool:
        """Whether `show` should be called for this step."""
        if self._quiet:
            return False
        if step in (self._first_step, self._total):
            return True
        if self._is_live:
            return monotonic() - self._shown_at >= LIVE_INTERVAL_S
        if self._every_steps is not None:
            return step % self._every_steps == 0
        return monotonic() - self._shown_at >= PLAIN_INTERVAL_S

    def show(self, view: StepView) -> None:
        if self._quiet:
            return
        self._shown_at = now_s = monotonic()
        if self._origin is None:
            self._origin = now_s, view.step
        left_s = self._left_s(view.step, now_s)
        if self._is_live:
            # One less than there is: a terminal that is full to the last column goes on to the next line.
            self._put(live_line(view, self._total, left_s, self._num_columns() - 1))
        else:
            print(plain_line(view, self._total, left_s), file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """A line for good, above the live one."""
        if self._quiet:
            return
        if self._is_live:
            self._put("")
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Take the live line away. Safe to call twice."""
        if self._is_live and self._origin is not None:
            self._put("")

    def _put(self, line: str) -> None:
        self._stream.write(f"\r{line}\x1b[K")
        self._stream.flush()

    def _num_columns(self) -> int:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:
            columns = 0
        return columns or shutil.get_terminal_size().columns

    def _left_s(self, step: int, now_s: float) -> float | None:
        assert self._origin is not None
        since_s, first = self._origin
        if self._total is None or step <= first:
            return None
        return (now_s - since_s) / (step - first) * (self._total - step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def plain_line(view: StepView, total: int | None, left_s: float | None) -> str:
    """For files: everything, in columns that stay where they are."""
    width = 0 if total is None else len(str(total))
    return "  ".join([f"step {_of_total(view.step, total, width)}", *_figures(view, left_s), *_workers(view)])


def live_line(view: StepView, total: int | None, left_s: float | None, width: int) -> str:
    """As much as fits: the step and the loss first, then the time left, the rates, the workers, and a bar."""
    step = _of_total(view.step, total, 0)
    loss, *others = _figures(view, left_s)
    # By importance; what does not fit is left out.
    parts = [step, loss, *reversed(others), *_workers(view)]
    room = width - len(step)
    kept = {step}
    for part in parts[1:]:
        if len(part) + 2 <= room:
            room -= len(part) + 2
            kept.add(part)
    line = "  ".join(part for part in [step, loss, *others, *_workers(view)] if part in kept)
    bar_width = min(BAR_WIDTH, room - 3)
    if total and bar_width >= 5:
        filled = bar_width * min(view.step, total) // total
        line = f"[{'#' * filled}{'.' * (bar_width - filled)}] {line}"
    return line[: max(width, 0)]


def _of_total(step: int, total: int | None, width: int) -> str:
    return f"{step}" if total is None else f"{step:>{width}}/{total}"


def _figures(view: StepView, left_s: float | None) -> list[str]:
    figures = [f"loss {formats.loss(view.loss)}"]
    if view.samples_per_s is not None:
        figures.append(f"{formats.rate(view.samples_per_s)} samples/s")
    if view.tokens_per_s is not None:
        figures.append(f"{formats.rate(view.tokens_per_s)} tokens/s")
    if left_s is not None:
        figures.append(f"{formats.duration(left_s)} left")
    return figures


def _workers(view: StepView) -> list[str]:
    """Nothing for a worker alone."""
    if len(view.shares) < 2:
        return []
    shares = f"shares {_per_worker([f'{share}' for share in view.shares], view.shares)}"
    if len(view.waiting) != len(view.shares):
        return [shares]
    return [shares, f"waiting {_per_worker([f'{part:.0%}' for part in view.waiting], view.waiting)}"]


def _per_worker(texts: Sequence[str], values: Sequence[float]) -> str:
    if len(texts) <= MAX_WORKERS_SHOWN:
        return ":".join(texts)
    by_value = sorted(range(len(values)), key=values.__getitem__)
    return f"{texts[by_value[0]]} to {texts[by_value[-1]]}"
