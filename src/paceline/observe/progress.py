"""Progress of a run: a live bar on a terminal, plain lines elsewhere.

The bar is redrawn by the training thread, and the cursor is not hidden: a killed run leaves the terminal usable. If
another process owns the terminal, as `paceline train` does, the worker writes the bar's content to a file.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from time import monotonic
from typing import Self, TextIO, cast

from paceline.observe import formats
from paceline.observe.best_effort import SafeStream, describe, warn
from paceline.observe.run_files import read_json

LIVE_INTERVAL_S = 0.2
# Between plain lines without `every_steps`.
PLAIN_INTERVAL_S = 10.0
BAR_WIDTH = 30
# On a narrow terminal, text is cut before the bar gets shorter than this.
MIN_BAR_WIDTH = 8
# Left free at the right: a terminal echoes ^C there, and text in the last column would make it begin a new line.
FREE_COLUMNS = 3
DEFAULT_SIZE = os.terminal_size((80, 24))
# Larger worlds are shown by the smallest and the largest value.
MAX_WORKERS_SHOWN = 8


@dataclass(eq=False)
class Progress:
    """Shows a run on one stream; a context manager, whose exit removes the bar, also after an error.

    On a terminal a bar is redrawn in place. Elsewhere there are plain lines: the first step, every `every_steps`-th
    (default: one every 10 seconds), and the last.

    total: steps of the run, None if unknown. start_step: completed steps when the run starts or is resumed. label: the
    name of a step in plain lines. keep_lines: print plain lines on a terminal too, above the bar, and only for the
    first and every `every_steps`-th step. quiet: show nothing. stream: default sys.stdout.
    live_file: instead of drawing the bar, write its content to this file for another process (see `read_live_file`).

    The numbers may be on a device: call `is_due` before reading them.
    """

    total: int | None
    _: KW_ONLY
    start_step: int = 0
    every_steps: int | None = None
    label: str = "step"
    keep_lines: bool = False
    quiet: bool = False
    stream: TextIO | None = None
    live_file: Path | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"every_steps={self.every_steps}: choose at least 1 step between two lines, or quiet=True")
        self._stream = SafeStream(sys.stdout if self.stream is None else self.stream)
        self._bar: Bar | _LiveFile | None = None
        if self.live_file is not None and not self.quiet:
            self._bar = _LiveFile(self.live_file, self.total)
        elif not self.quiet and can_show_bar(self._stream):
            self._bar = Bar(self._stream, self.total)
        self._shown_at = -math.inf
        # Step times are measured from the end of the first step, which takes longer than others.
        self._origin: tuple[float, int] | None = None

    def is_due(self, step: int) -> bool:
        """Whether to call `show` for this step."""
        self._origin = self._origin or (monotonic(), step)
        if self.quiet:
            return False
        is_stale = self._bar is not None and monotonic() - self._shown_at >= LIVE_INTERVAL_S
        return is_stale or self._has_line(step)

    def show(
        self,
        step: int,
        loss: float | None = None,
        *,
        samples_per_s: float | None = None,
        tokens_per_s: float | None = None,
        shares: Sequence[int] = (),
        waiting: Sequence[float] = (),
    ) -> None:
        """Show a step. shares, waiting (fractions of the time): one number per worker, or empty."""
        if self.quiet:
            return
        has_line = self._bar is None or (self.keep_lines and self._has_line(step))
        self._shown_at = monotonic()
        self._origin = self._origin or (self._shown_at, step)
        rates = [] if samples_per_s is None else [f"{formats.rate(samples_per_s)} samples/s"]
        rates += [] if tokens_per_s is None else [f"{formats.rate(tokens_per_s)} tokens/s"]
        remaining = [] if (left_s := self.left_s(step)) is None else [f"{formats.duration(left_s)} left"]
        workers = [f"shares {_per_worker(shares, '')}"] if len(shares) > 1 else []
        workers += [f"waiting {_per_worker(waiting, '.0%')}"] if workers and len(waiting) == len(shares) else []
        of_total = "" if self.total is None else f"/{self.total}"
        if has_line:
            number = f"{self.label} {step:>{len(of_total[1:])}}{of_total}"
            if self.keep_lines:
                self.note(f"{number}  loss {loss:.6g}")
            else:
                self.note("  ".join([number, f"loss {formats.loss(loss)}", *rates, *remaining, *workers]))
        if self._bar is not None:
            # The most important first: a narrow terminal cuts off the end.
            parts = [f"{step}{of_total}", f"loss {formats.loss(loss)}", *remaining, *rates, *workers]
            self._bar.draw(step, "  ".join(parts))

    def left_s(self, step: int) -> float | None:
        """Seconds to the end of the run, after this step; None if unknown."""
        start_s, first = self._origin or (0.0, step)
        if self.total is None or step <= first:
            return None
        return (monotonic() - start_s) / (step - first) * (self.total - step)

    def note(self, text: str) -> None:
        """Print a line, above the bar."""
        self.close()
        if not self.quiet:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the bar. Safe to call twice; the next `show` draws it again."""
        if self._bar is not None:
            self._bar.erase()

    def _has_line(self, step: int) -> bool:
        if step == self.start_step + 1 or (step == self.total and not self.keep_lines):
            return True
        if self._bar is not None and not self.keep_lines:
            return False
        if self.every_steps is not None:
            return step % self.every_steps == 0
        return monotonic() - self._shown_at >= PLAIN_INTERVAL_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def can_show_bar(stream: SafeStream | TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Bar:
    """A rich progress bar and a line of text, redrawn on demand."""

    def __init__(self, stream: SafeStream, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        class VisibleCursorConsole(Console):
            def show_cursor(self, show: bool = True) -> bool:
                return False  # a cursor that rich hides stays hidden after kill -9

        self._stream = stream
        self._total = total
        self._console = VisibleCursorConsole(file=cast(TextIO, stream), force_terminal=True)
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
        self._progress = Progress(
            *([] if total is None else [BarColumn(BAR_WIDTH)]),
            text,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("", total=total)

    def draw(self, step: int, text: str) -> None:
        with suppress(OSError):  # keep the last known size
            size = os.get_terminal_size(self._stream.fileno())
            columns, lines = size if all(size) else DEFAULT_SIZE  # a pseudo-terminal may report 0
            self._console.size = (max(columns - FREE_COLUMNS, 1), lines)
        room = self._console.width - (0 if self._total is None else MIN_BAR_WIDTH + 1)
        while len(text) > room and "  " in text:
            text = text.rpartition("  ")[0]
        self._progress.update(self._task, completed=step, description=text)
        self._progress.start()
        self._progress.refresh()

    def erase(self) -> None:
        self._progress.stop()


class _LiveFile:
    """The content of a bar in a file, overwritten in place. The first failure is a warning and ends the writing."""

    def __init__(self, path: Path, total: int | None) -> None:
        self._path: Path | None = path
        self._total = total

    def draw(self, step: int, text: str) -> None:
        if self._path is None:
            return
        try:
            self._path.write_text(json.dumps({"step": step, "total": self._total, "text": text}) + "\n")
        except OSError as error:
            self._path = None
            warn(f"progress can no longer be shown, training continues: {describe(error)}")

    def erase(self) -> None:
        """The process that draws the bar erases it."""


def read_live_file(path: Path) -> tuple[int, int | None, str] | None:
    """Step, total and text of the bar; None if nothing was written yet, or it is being written."""
    found = read_json(path)
    return None if found is None else (found["step"], found["total"], found["text"])


def _per_worker(values: Sequence[float], form: str) -> str:
    if len(values) <= MAX_WORKERS_SHOWN:
        return ":".join(format(value, form) for value in values)
    return f"{min(values):{form}} to {max(values):{form}}"
