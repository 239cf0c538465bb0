"""Lines for good, and a live one on a terminal."""

from __future__ import annotations

import io
import os
import pty
from contextlib import suppress

import pytest

from paceline.observe import progress
from paceline.observe.progress import StepLines

ERASE = "\r\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def take(self) -> str:
        """What was written since the last time."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


class Clock:
    """Time that passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(progress, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def play(lines: StepLines, total: int) -> list[int]:
    """Run through all steps as an entry point does; the steps whose loss was read."""
    read = []
    for step in range(1, total + 1):
        if lines.is_due(step):
            read.append(step)
            lines.show(step, 1.0 / step)
    lines.close()
    return read


@pytest.mark.parametrize(
    ("total", "interval", "due"),
    [
        (10, 0, []),
        (10, 1, list(range(1, 11))),
        (10, 3, [1, 3, 6, 9]),
        (10, 10, [1, 10]),
        (10, 11, [1]),
        (1, 10, [1]),
    ],
)
def test_step_one_and_every_nth(total: int, interval: int, due: list[int]) -> None:
    stream = io.StringIO()
    assert play(StepLines(total, interval, stream=stream), total) == due
    width = len(str(total))
    assert stream.getvalue() == "".join(f"step {step:>{width}}/{total}  loss {1 / step:.6g}\n" for step in due)


def test_a_file_gets_plain_lines() -> None:
    stream = io.StringIO()
    lines = StepLines(120, 60, label="iteration", stream=stream)
    for step, loss in [(1, 0.123456789), (60, 1234567.0), (120, float("nan"))]:
        lines.show(step, loss)
    lines.close()
    assert stream.getvalue().splitlines() == [
        "iteration   1/120  loss 0.123457",
        "iteration  60/120  loss 1.23457e+06",
        "iteration 120/120  loss nan",
    ]


def test_stdout_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    StepLines(5, 5).show(5, 0.5)
    assert capsys.readouterr().out == "step 5/5  loss 0.5\n"


def test_a_terminal_gets_a_bar_that_is_redrawn_in_place(clock: Clock) -> None:
    terminal = Terminal()
    lines = StepLines(20, 10, stream=terminal)
    clock.now_s += 2.0
    lines.show(1, 0.5)
    assert terminal.take() == (f"{ERASE}step  1/20  loss 0.5\n{ERASE}[{'#' * 1}{'.' * 29}] 1/20  loss 0.5  38 s left")
    clock.now_s += 8.0
    lines.show(5, 0.25)  # no line of its own: only the bar moves
    assert terminal.take() == f"{ERASE}[{'#' * 7}{'.' * 23}] 5/20  loss 0.25  30 s left"
    lines.show(20, 0.125)
    assert f"[{'#' * 30}] 20/20  loss 0.125  0 s left" in terminal.take()
    lines.close()
    assert terminal.take() == ERASE, "the bar goes, the lines stay"


def test_a_bar_is_due_only_when_it_is_old(clock: Clock) -> None:
    lines = StepLines(1000, 500, stream=Terminal())
    assert lines.is_due(1)
    lines.show(1, 1.0)
    assert not lines.is_due(2)
    clock.now_s += progress.LIVE_INTERVAL_S / 2
    assert not lines.is_due(3)
    clock.now_s += progress.LIVE_INTERVAL_S
    assert lines.is_due(4)
    lines.show(4, 1.0)
    assert not lines.is_due(5)
    assert lines.is_due(500)


def test_no_interval_means_silence_on_a_terminal_too(clock: Clock) -> None:
    terminal = Terminal()
    lines = StepLines(10, 0, stream=terminal)
    clock.now_s += 10.0
    assert play(lines, 10) == []
    assert terminal.take() == ""


def test_a_real_terminal() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        assert set(play(StepLines(4, 2, stream=terminal), 4)) >= {1, 2, 4}
    shown = b""
    with os.fdopen(ours, "rb", buffering=0) as screen, suppress(OSError):  # how a terminal nobody writes to ends
        while chunk := screen.read(4096):
            shown += chunk
    text = shown.decode()
    assert text.count("step 1/4  loss 1\r\n") == 1
    assert "[##############################] 4/4" in text
    assert text.endswith(ERASE)
