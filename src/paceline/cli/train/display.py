"""The terminal of `paceline train`: one writer for the workers' output, the command's own messages, and the progress.

The leading worker prints to files and puts its progress into a live file. The command copies both to the terminal, so
that a message never lands in the middle of the bar.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from paceline.cli.commands import terminal_width
from paceline.observe import formats
from paceline.observe.best_effort import SafeStream
from paceline.observe.progress import Bar, can_show_bar, read_live_file


class Display:
    """Draws the content of a live file below everything that is printed."""

    def __init__(self, live_file: Path, stream: TextIO) -> None:
        self._live_file = live_file
        self._stream = SafeStream(stream)
        self._bar: Bar | None = None
        self._shown: tuple[int, int | None, str] | None = None

    def update(self) -> bool:
        """Draw changes. Called by `launch_workers`; the result never ends the workers."""
        found = read_live_file(self._live_file)
        if found is not None and found != self._shown:
            self._shown = found
            self.draw()
        return False

    def draw(self) -> None:
        if self._shown is not None:
            step, total, text = self._shown
            self._bar = self._bar or Bar(self._stream, total)
            self._bar.draw(step, text)

    def erase(self) -> None:
        if self._bar is not None:
            self._bar.erase()


class _AboveTheBar:
    """A stream whose complete lines appear above the bar. The rest of a line waits for its end."""

    def __init__(self, stream: TextIO, display: Display) -> None:
        self._stream = stream
        self._display = display
        self._rest = ""

    def write(self, text: str) -> int:
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._display.erase()
            # Paceline's own long messages are broken between words. Other output is passed on unchanged.
            width = terminal_width() - 1
            shown = (formats.wrapped(x, width) if x.startswith("paceline: ") else x for x in lines.split("\n"))
            self._stream.writelines(f"{line}\n" for line in shown)
            self._stream.flush()
            self._display.draw()
        return len(text)

    def finish(self) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone
            self._stream.write(self._rest)
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def shown_progress(live_file: Path) -> Iterator[Display | None]:
    """While workers run: what this process prints appears above their progress. None if stdout is not a terminal."""
    if not can_show_bar(sys.stdout):
        yield None
        return
    display = Display(live_file, sys.stdout)
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream.isatty():
                above = _AboveTheBar(stream, display)
                stack.callback(above.finish)
                stack.enter_context(redirect(cast(TextIO, above)))
        stack.callback(display.erase)
        yield display
