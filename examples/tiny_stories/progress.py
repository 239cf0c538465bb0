"""Progress while training: a live bar on a terminal, plain lines elsewhere, nothing on workers other than the first."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Report(Protocol):
    def __call__(self, step: int, loss: float, words_per_s: float) -> None: ...


@contextmanager
def progress(num_steps: int, *, enabled: bool, every: int = 25) -> Iterator[Report]:
    """Yields a function to call after every step."""
    if not enabled:
        yield _report_nothing
    elif sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        with _live_bar(num_steps) as report:
            yield report
    else:
        yield _plain_lines(num_steps, every)


def _report_nothing(step: int, loss: float, words_per_s: float) -> None:
    """For the workers that stay silent."""


def _plain_lines(num_steps: int, every: int) -> Report:
    def report(step: int, loss: float, words_per_s: float) -> None:
        if step == 1 or step % every == 0 or step == num_steps:
            print(f"step {step:>4}/{num_steps}  loss {loss:.3f}  {words_per_s:.0f} words/s", flush=True)

    return report


@contextmanager
def _live_bar(num_steps: int) -> Iterator[Report]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[words_per_s]:.0f} words/s"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=num_steps, loss=float("nan"), words_per_s=0.0)

        def report(step: int, loss: float, words_per_s: float) -> None:
            bar.update(task, completed=step, loss=loss, words_per_s=words_per_s)

        yield report
