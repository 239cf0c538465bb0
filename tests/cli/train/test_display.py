"""The display of `paceline train`: lines above the bar, from one writer."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from paceline.cli.train.display import shown_progress
from paceline.observe.progress import Progress, read_live_file


class Screen:
    """A pseudo-terminal; in a `with` block, standard output and error of this process."""

    def __init__(self, columns: int, patch: pytest.MonkeyPatch) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(theirs, "w")
        self._written = b""
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", str(columns))

    def lines(self) -> list[str]:
        """What the screen shows, line by line, after all that was written."""
        self.stream.flush()
        while select.select([self._ours], [], [], 0)[0]:
            self._written += os.read(self._ours, 4096)
        written = re.sub(r"\x1b\[[\d;]*m", "", self._written.decode())
        lines, row = [""], 0
        for part in re.findall(r"\x1b\[1A|\x1b\[2K|\r|\n|[^\x1b\r\n]+", written):
            if part == "\x1b[1A":
                row -= 1
            elif part == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif part == "\x1b[2K":
                lines[row] = ""
            elif part != "\r":
                lines[row] = part
        return lines

    def __enter__(self) -> None:
        self._redirected = ExitStack()
        self._redirected.enter_context(redirect_stdout(self.stream))
        self._redirected.enter_context(redirect_stderr(self.stream))

    def __exit__(self, *_: object) -> None:
        self._redirected.close()

    def close(self) -> None:
        self.stream.close()
        os.close(self._ours)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    screen = Screen(80, monkeypatch)
    yield screen
    screen.close()


def put(path: Path, step: int, text: str) -> None:
    path.write_text(json.dumps({"step": step, "total": 100, "text": text}) + "\n")


def test_lines_appear_above_the_bar_whoever_prints_them(screen: Screen, tmp_path: Path) -> None:
    live_file = tmp_path / "progress"
    with screen, shown_progress(live_file) as display:
        assert display is not None
        assert display.update() is False  # nothing yet
        print("first")
        put(live_file, 10, "10/100  loss 1.5  " + "12.5k samples/s  " * 5)
        display.update()
        print("from a worker: ", end="")
        print("evaluation", flush=True)
        print(
            "paceline: a message that is longer than eighty columns is broken between two words of it", file=sys.stderr
        )
        put(live_file, 20, "20/100  loss 0.5")
        display.update()
        lines = screen.lines()
        assert lines[:2] == ["first", "from a worker: evaluation"]
        assert lines[2:4] == [
            "paceline: a message that is longer than eighty columns is broken between two",
            "  words of it",
        ]
        assert re.fullmatch(r"[━╸╺]+ +20/100  loss 0.5 *", lines[4])
        assert len(lines[4].rstrip()) <= 80 - 3, "room for ^C"
        print("unfinished", end="")
    lines = screen.lines()
    assert "unfinished" in lines
    assert not any("20/100" in line for line in lines), "the bar is gone"


def test_a_narrow_terminal_leaves_out_figures_and_keeps_the_bar(screen: Screen, tmp_path: Path) -> None:
    live_file = tmp_path / "progress"
    put(live_file, 50, "50/100  loss 1.5  3 s left  12.5k samples/s  52.1k tokens/s  shares 6:2  waiting 1%:12%")
    with screen, shown_progress(live_file) as display:
        assert display is not None
        display.update()
        (line,) = [line for line in screen.lines() if line.strip()]
    assert re.fullmatch(r"[━╸╺ ]{8,}50/100  loss 1.5  3 s left  12.5k samples/s  52.1k tokens/s *", line)


def test_without_a_terminal_there_is_no_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with shown_progress(tmp_path / "progress") as display:
        assert display is None


def test_a_live_file_carries_the_bar_and_its_failure_is_a_warning(tmp_path: Path) -> None:
    shown = Progress(100, live_file=tmp_path / "progress", stream=io.StringIO())
    assert read_live_file(tmp_path / "progress") is None
    shown.show(7, 0.25, samples_per_s=80.0)
    assert read_live_file(tmp_path / "progress") == (7, 100, "7/100  loss 0.25  80.0 samples/s")
    (tmp_path / "progress").write_text('{"step": 8, "tot')
    assert read_live_file(tmp_path / "progress") is None
    lost = Progress(100, live_file=tmp_path / "no" / "progress", stream=io.StringIO())
    with pytest.warns(UserWarning, match="progress can no longer be shown, training continues"):
        lost.show(1)
    lost.show(2)  # no second warning
