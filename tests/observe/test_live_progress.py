"""The live line of a run, its plain lines, and what a terminal looks like afterwards."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from paceline.observe import formats, progress, rates
from paceline.observe.progress import Progress, StepView, live_line, plain_line
from paceline.observe.rates import RateMeter

VIEW = StepView(1200, 1.23456, 812.3, 52111.0, (6, 2), (0.01, 0.12))
ERASED = "\r\x1b[K"


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        for module in (progress, rates):
            monkeypatch.setattr(module, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (
            140,
            "[#######.......................] 1200/5000  loss 1.235  812 samples/s  52.1k tokens/s  3:12 left"
            "  shares 6:2  waiting 1%:12%",
        ),
        (
            110,
            "[###.............] 1200/5000  loss 1.235  812 samples/s  52.1k tokens/s  3:12 left  shares 6:2"
            "  waiting 1%:12%",
        ),
        (79, "1200/5000  loss 1.235  812 samples/s  52.1k tokens/s  3:12 left  shares 6:2"),
        (60, "1200/5000  loss 1.235  52.1k tokens/s  3:12 left  shares 6:2"),
        (40, "[#....] 1200/5000  loss 1.235  3:12 left"),
        (22, "1200/5000  loss 1.235"),
        (8, "1200/500"),
        (0, ""),
    ],
)
def test_a_live_line_shows_what_fits(width: int, line: str) -> None:
    assert live_line(VIEW, 5000, 192.0, width) == line
    assert len(line) <= width


def test_a_live_line_is_never_wider_than_the_terminal() -> None:
    many = StepView(7, float("nan"), 1e12, 1e15, tuple(range(64)), tuple(i / 64 for i in range(64)))
    for width in range(160):
        for total in (None, 7, 10**9):
            assert len(live_line(many, total, 1e9, width)) <= width


def test_what_is_not_known_is_not_shown() -> None:
    assert live_line(StepView(3, float("nan")), None, None, 79) == "3  loss nan"
    alone = StepView(3, 0.5, 10.0, None, (4,), (0.0,))
    assert plain_line(alone, 20, None) == "step  3/20  loss 0.5  10.0 samples/s"


def test_many_workers_are_shown_by_their_extremes() -> None:
    view = StepView(1, 1.0, shares=(3, 1, 2, 3, 3, 3, 3, 3, 9), waiting=(0.1, 0.02, *[0.05] * 6, 0.3))
    assert plain_line(view, 2, None).endswith("shares 1 to 9  waiting 2% to 30%")


def plain(total: int, every_steps: int | None, advance: Callable[[], None] = lambda: None, start_step: int = 0) -> str:
    stream = io.StringIO()
    with Progress(total, start_step=start_step, every_steps=every_steps, stream=stream) as shown:
        for step in range(start_step + 1, total + 1):
            advance()
            if shown.is_due(step):
                shown.show(StepView(step, 1.0))
    return stream.getvalue()


def steps_in(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"step +(\d+)/", text)]


def test_a_file_gets_the_first_every_nth_and_the_last_step() -> None:
    assert steps_in(plain(10, 4)) == [1, 4, 8, 10]
    assert steps_in(plain(10, 4, start_step=5)) == [6, 8, 10]


def test_a_file_gets_a_line_every_ten_seconds_otherwise(clock: Clock) -> None:
    def advance() -> None:
        clock.now_s += 3.0

    assert steps_in(plain(13, None, advance)) == [1, 5, 9, 13]


def test_the_time_left_counts_from_the_first_step(clock: Clock) -> None:
    stream = io.StringIO()
    shown = Progress(100, every_steps=10, stream=stream)
    clock.now_s += 500.0  # compiling, reading
    shown.show(StepView(1, 1.0))
    clock.now_s += 18.0
    shown.show(StepView(10, 1.0))
    first, second = stream.getvalue().splitlines()
    assert "left" not in first
    assert second.endswith("3:00 left")


def test_quiet_is_quiet() -> None:
    stream = io.StringIO()
    with Progress(10, quiet=True, stream=stream) as shown:
        assert not any(shown.is_due(step) for step in range(1, 11))
        shown.show(StepView(1, 1.0))
        shown.note("hello")
    assert stream.getvalue() == ""


def test_a_wrong_interval_is_an_error() -> None:
    with pytest.raises(ValueError, match="every_steps=0: choose at least 1 step"):
        Progress(10, every_steps=0)


class Screen:
    """A real terminal of a chosen width, and what was written to it."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        self._theirs_number = theirs
        self.stream = os.fdopen(theirs, "w")
        self.resize(60)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._theirs_number, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self) -> str:
        """All that was written; the terminal is closed."""
        self.stream.close()
        shown = b""
        with os.fdopen(self._ours, "rb", buffering=0) as screen, suppress(OSError):  # how a closed terminal ends
            while chunk := screen.read(4096):
                shown += chunk
        return shown.decode()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    yield screen
    with suppress(OSError):
        screen.read()


def test_a_terminal_has_one_line_that_is_written_over(clock: Clock, screen: Screen) -> None:
    with Progress(50, stream=screen.stream) as shown:
        assert shown.is_due(1)
        shown.show(StepView(1, 2.0))
        assert not shown.is_due(2)
        clock.now_s += 2 * progress.LIVE_INTERVAL_S
        assert shown.is_due(2)
        shown.show(StepView(2, 1.0))
        shown.note("step 2: evaluation loss 1.5")
        screen.resize(20)
        shown.show(StepView(50, 0.5))
    written = screen.read()
    bar = "[" + "." * 30 + "]"
    assert written == (
        f"\r{bar} 1/50  loss 2\x1b[K"
        f"\r[#{'.' * 29}] 2/50  loss 1  9.6 s left\x1b[K"
        f"{ERASED}step 2: evaluation loss 1.5\r\n"
        "\r50/50  loss 0.5\x1b[K"
        f"{ERASED}"
    )
    assert "\x1b[?25l" not in written, "a hidden cursor would stay hidden after a kill"


def test_after_an_error_the_cursor_is_on_an_empty_line(screen: Screen) -> None:
    with pytest.raises(RuntimeError), Progress(50, stream=screen.stream) as shown:
        shown.show(StepView(1, 2.0))
        raise RuntimeError
    assert screen.read().endswith(ERASED)


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Progress(5, stream=screen.stream) as shown:
        shown.show(StepView(1, 2.0))
    assert screen.read() == "step 1/5  loss 2\r\n"


def test_rates_are_those_since_the_last_look(clock: Clock) -> None:
    meter = RateMeter(2)
    for _ in range(4):
        clock.now_s += 0.5
        meter.add(16, (3, 1), [0.1, 0.3], num_tokens=100)
    found = meter.take()
    assert (found.samples_per_s, found.tokens_per_s, found.shares) == (32.0, 200.0, (12, 4))
    assert found.waiting == pytest.approx((0.0, 0.4))
    clock.now_s += 1.0
    meter.add(8, (2, 2))
    again = meter.take()
    assert (again.samples_per_s, again.tokens_per_s, again.shares, again.waiting) == (8.0, None, (2, 2), (0.0, 0.0))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1:00"),
        (185, "3:05"),
        (7385, "2:03:05"),
        (86399.6, "1 d 00:00"),
        (3 * 86400 + 4 * 3600, "3 d 04:00"),
        (float("nan"), "?"),
        (float("inf"), "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert formats.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (0.52, "0.52"),
        (9.999, "10.0"),
        (81.34, "81.3"),
        (99.97, "100"),
        (999.6, "1.00k"),
        (52111, "52.1k"),
        (1.5e6, "1.50M"),
        (2e9, "2.00G"),
        (float("nan"), "?"),
    ],
)
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert formats.rate(value) == text
