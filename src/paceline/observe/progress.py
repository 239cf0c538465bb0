"""Progress of a run: a live bar on a terminal, plain lines elsewhere; and the rates between two reports.

The bar is redrawn by the training thread, and the cursor is not hidden: a killed run leaves the terminal usable. If
another process owns the terminal, as `paceline train` does, the worker writes the bar's content to a file.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from time import monotonic
from typing import Protocol, Self, TextIO, cast

from paceline.core.timing import NOT_MEASURED, Timing
from paceline.core.waiting import split_sync
from paceline.observe import formats
from paceline.observe.best_effort import SafeStream, describe, warn

LIVE_INTERVAL_S = 0.2
# Between plain lines without `every_steps`.
PLAIN_INTERVAL_S = 10.0
BAR_WIDTH = 30
# On a narrow terminal, figures are left out before the bar gets shorter than this.
MIN_BAR_WIDTH = 8
# Left free at the right: a terminal echoes ^C there, and text in the last column would make it begin a new line.
FREE_COLUMNS = 3
DEFAULT_SIZE = os.terminal_size((80, 24))
# What a worker's time goes into, besides waiting for others.
LANES = ("computing", "data", "exchange", "rest")
# Larger worlds are shown by the smallest and the largest value.
MAX_WORKERS_SHOWN = 8


class Progress:
    """Shows a run on one stream; a context manager, whose exit removes the bar, also after an error.

    On a terminal a bar is redrawn in place. Elsewhere there are plain lines: the first step, every `every_steps`-th
    (default: one every 10 seconds), and the last.

    total: steps of the run, None if unknown. start_step: completed steps when the run starts or is resumed. label: the
    name of a step in plain lines. keep_lines: print plain lines on a terminal too, above the bar, and only those of
    the first and every `every_steps`-th step. quiet: show nothing. stream: default sys.stdout.
    live_file: instead of drawing the bar, write its content there for another process (see `read_live_file`).

    The numbers may be on a device: call `is_due` before reading them.
    """

    def __init__(
        self,
        total: int | None,
        *,
        start_step: int = 0,
        every_steps: int | None = None,
        label: str = "step",
        keep_lines: bool = False,
        quiet: bool = False,
        stream: TextIO | None = None,
        live_file: Path | None = None,
    ) -> None:
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps={every_steps}: choose at least 1 step between two lines, or quiet=True")
        self._total = total
        self._first_step = start_step + 1
        self._every_steps = every_steps
        self._label = label
        self._keep_lines = keep_lines
        self._quiet = quiet
        self._stream = SafeStream(sys.stdout if stream is None else stream)
        self._bar: _Drawing | None = None
        if live_file is not None and not quiet:
            self._bar = _LiveFile(live_file, total)
        elif not quiet and can_show_bar(self._stream):
            self._bar = Bar(self._stream, total)
        self._shown_at = -math.inf
        # Step times are measured from the first step shown, since the first step takes longer than others.
        self._origin: tuple[float, int] | None = None

    def is_due(self, step: int) -> bool:
        """Whether to call `show` for this step."""
        if self._quiet:
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
        if self._quiet:
            return
        has_line = self._bar is None or (self._keep_lines and self._has_line(step))
        self._shown_at = now_s = monotonic()
        self._origin = start_s, first = self._origin or (now_s, step)
        rates = [] if samples_per_s is None else [f"{formats.rate(samples_per_s)} samples/s"]
        rates += [] if tokens_per_s is None else [f"{formats.rate(tokens_per_s)} tokens/s"]
        remaining = []
        if self._total is not None and step > first:
            remaining = [f"{formats.duration((now_s - start_s) / (step - first) * (self._total - step))} left"]
        workers = [f"shares {_per_worker(shares, '')}"] if len(shares) > 1 else []
        workers += [f"waiting {_per_worker(waiting, '.0%')}"] if workers and len(waiting) == len(shares) else []
        of_total = "" if self._total is None else f"/{self._total}"
        if has_line:
            number = f"{self._label} {step:>{len(of_total[1:])}}{of_total}"
            if self._keep_lines:
                self.note(f"{number}  loss {loss:.6g}")
            else:
                self.note("  ".join([number, f"loss {formats.loss(loss)}", *rates, *remaining, *workers]))
        if self._bar is not None:
            # The most important first: a narrow terminal cuts off the end.
            parts = [f"{step}{of_total}", f"loss {formats.loss(loss)}", *remaining, *rates, *workers]
            self._bar.draw(step, "  ".join(parts))

    def note(self, text: str) -> None:
        """Print a line, above the bar."""
        self.close()
        if not self._quiet:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the bar. Safe to call twice; the next `show` draws it again."""
        if self._bar is not None:
            self._bar.erase()

    def _has_line(self, step: int) -> bool:
        if step == self._first_step or (step == self._total and not self._keep_lines):
            return True
        if self._bar is not None and not self._keep_lines:
            return False
        if self._every_steps is not None:
            return step % self._every_steps == 0
        return monotonic() - self._shown_at >= PLAIN_INTERVAL_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def can_show_bar(stream: SafeStream | TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class _Drawing(Protocol):
    def draw(self, step: int, text: str) -> None: ...

    def erase(self) -> None: ...


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
    """The content of a bar in a file, overwritten in place. A failure is a warning, and the last one."""

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
            warn(f"progress cannot be shown any more, training continues: {describe(error)}")

    def erase(self) -> None:
        """The process that draws erases."""


def read_live_file(path: Path) -> tuple[int, int | None, str] | None:
    """Step, total and text of the bar; None if nothing was written yet, or it is being written."""
    try:
        text = path.read_text()
        found = json.loads(text) if text.endswith("\n") else None
    except (OSError, ValueError):
        return None
    return None if found is None else (found["step"], found["total"], found["text"])


def _per_worker(values: Sequence[float], form: str) -> str:
    if len(values) <= MAX_WORKERS_SHOWN:
        return ":".join(format(value, form) for value in values)
    return f"{min(values):{form}} to {max(values):{form}}"


@dataclass(frozen=True)
class Rates:
    """What workers did in an interval; tuples have one entry per worker.

    shares: micro-batches. waiting: fraction of the time, 0 to 1, spent waiting for slower workers. lanes: the other
    fractions, by name: `computing`, `data` (waiting for data), `exchange` and `rest`; with `waiting` they add up to 1.
    speeds: micro-batches per second while computing, including the wait for data; 0 until measured. efficiency: the
    run's speed over the sum of the workers' speeds. Without a measurement lanes is empty and efficiency None.
    """

    samples_per_s: float
    tokens_per_s: float | None
    shares: tuple[int, ...]
    waiting: tuple[float, ...]
    lanes: Mapping[str, tuple[float, ...]]
    speeds: tuple[float, ...]
    efficiency: float | None


class RateMeter:
    """Accumulates steps; `take` returns the rates since the previous `take`."""

    def __init__(self, num_workers: int) -> None:
        self._workers = [_WorkerTotal() for _ in range(num_workers)]
        self._reset()

    def _reset(self) -> None:
        self._start = monotonic()
        self._num_samples = 0
        self._num_tokens = 0.0
        self._num_counted = 0  # samples of the steps whose tokens are known
        self._exchange_s = 0.0
        for worker in self._workers:
            worker.reset()

    def add(
        self, num_samples: int, shares: Sequence[int], timings: Sequence[Timing] = (), num_tokens: float | None = None
    ) -> None:
        """Add a step: each worker's micro-batches, its times (`record.timings`), and the tokens of all workers.

        With averaging the tokens of the first steps are unknown (None): they are taken to be as many per sample as
        those of the others.
        """
        self._num_samples += num_samples
        if num_tokens is not None:
            self._num_tokens += num_tokens
            self._num_counted += num_samples
        if len(shares) != len(self._workers):  # workers left or joined
            self._workers = [_WorkerTotal() for _ in shares]
        exchange_s, waiting_s = split_sync([timing.sync for timing in timings])
        self._exchange_s += exchange_s
        for worker, count, timing, waited_s in zip_longest(self._workers, shares, timings, waiting_s):
            worker.add(count, timing or NOT_MEASURED, (waited_s or 0.0) + (timing or NOT_MEASURED).feed)

    def take(self) -> Rates:
        seconds = max(monotonic() - self._start, 1e-9)
        workers = self._workers
        speeds = tuple(worker.speed for worker in workers)
        is_measured = any(speeds)
        fractions = [worker.fractions(seconds, self._exchange_s) for worker in workers]
        counts = tuple(worker.count for worker in workers)
        rates = Rates(
            samples_per_s=self._num_samples / seconds,
            tokens_per_s=self._num_tokens / self._num_counted * self._num_samples / seconds
            if self._num_counted
            else None,
            shares=counts,
            waiting=tuple(each["waiting"] for each in fractions),
            lanes={name: tuple(each[name] for each in fractions) for name in LANES} if is_measured else {},
            speeds=speeds,
            efficiency=sum(counts) / seconds / sum(speeds) if is_measured else None,
        )
        self._reset()
        return rates


class _WorkerTotal:
    """One worker's sums since the last `reset`."""

    def __init__(self) -> None:
        self._last = NOT_MEASURED
        self.reset()

    def reset(self) -> None:
        self.count = 0
        self._busy_s = self._data_s = self._waiting_s = 0.0

    def add(self, count: int, timing: Timing, waiting_s: float) -> None:
        """Not every step has a measurement: until the next one, the last one counts."""
        if timing.micro_batch:
            self._last = timing
        self.count += count
        self._busy_s += count * self._last.micro_batch
        self._data_s += count * self._last.data
        self._waiting_s += waiting_s

    @property
    def speed(self) -> float:
        if self._busy_s:
            return self.count / self._busy_s
        return 1.0 / self._last.micro_batch if self._last.micro_batch else 0.0

    def fractions(self, seconds: float, exchange_s: float) -> dict[str, float]:
        """Of the time since the last `reset`. Measurements of a GPU lag behind, so their sum may exceed it."""
        total_s = max(seconds, self._busy_s + self._waiting_s + exchange_s)
        parts = {
            "computing": (self._busy_s - self._data_s) / total_s,
            "data": self._data_s / total_s,
            "waiting": self._waiting_s / total_s,
            "exchange": exchange_s / total_s,
        }
        return {**parts, "rest": max(1.0 - sum(parts.values()), 0.0)}
