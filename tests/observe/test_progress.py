"""Progress: plain lines, the bar on a terminal, and the state of the terminal afterwards."""

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
from typing import Any

import pytest

from paceline.core.timing import Timing
from paceline.observe import progress, rates
from paceline.observe.progress import Progress
from paceline.observe.rates import RateMeter

RATES: dict[str, Any] = {"samples_per_s": 812.3, "tokens_per_s": 52111.0, "shares": (6, 2), "waiting": (0.01, 0.12)}
HIDE_CURSOR = "\x1b[?25l"


class Clock:
    """Time that passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        for module in (progress, rates):
            monkeypatch.setattr(module, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# Plain lines


def plain(total: int, advance: Callable[[], None] = lambda: None, **settings: Any) -> str:
    stream = io.StringIO()
    with Progress(total, stream=stream, **settings) as shown:
        for step in range(settings.get("start_step", 0) + 1, total + 1):
            advance()
            if shown.is_due(step):
                shown.show(step, 1.0 / step)
    return stream.getvalue()


def steps_in(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"^step +(\d+)/", text, re.MULTILINE)]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"every_steps": 4}, [1, 4, 8, 10]),
        ({"every_steps": 4, "start_step": 5}, [6, 8, 10]),
        ({"every_steps": 3, "keep_lines": True}, [1, 3, 6, 9]),
        ({"every_steps": 11, "keep_lines": True}, [1]),
        ({"every_steps": 1, "quiet": True}, []),
    ],
)
def test_a_file_gets_chosen_steps(settings: dict[str, Any], steps: list[int]) -> None:
    assert steps_in(plain(10, **settings)) == steps


def test_a_file_gets_a_line_every_ten_seconds_by_default(clock: Clock) -> None:
    def advance() -> None:
        clock.now_s += 3.0

    assert steps_in(plain(13, advance)) == [1, 5, 9, 13]


def test_a_plain_line_has_all_figures(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Progress(5000, every_steps=10)
    clock.now_s += 500.0  # compiling, reading: not part of a step's time
    shown.show(1, 2.0)
    clock.now_s += 18.0
    shown.show(10, 1.23456, **RATES)
    shown.show(20, float("nan"), samples_per_s=10.0, shares=(4,), waiting=(0.0,))
    assert capsys.readouterr().out.splitlines() == [
        "step    1/5000  loss 2",
        "step   10/5000  loss 1.235  812 samples/s  52.1k tokens/s  2:46:20 left  shares 6:2  waiting 1%:12%",
        "step   20/5000  loss nan  10.0 samples/s  1:18:38 left",
    ]


def test_many_workers_are_shown_by_their_extremes(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(None).show(7, shares=(3, 1, 2, 3, 3, 3, 3, 3, 9), waiting=(0.1, 0.02, *[0.05] * 6, 0.3))
    assert capsys.readouterr().out == "step 7  loss -  shares 1 to 9  waiting 2% to 30%\n"


def test_kept_lines_have_six_digits_of_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Progress(120, every_steps=60, label="iteration", keep_lines=True)
    for step, loss in [(1, 0.123456789), (60, 1234567.0), (120, float("nan"))]:
        shown.show(step, loss)
    assert capsys.readouterr().out.splitlines() == [
        "iteration   1/120  loss 0.123457",
        "iteration  60/120  loss 1.23457e+06",
        "iteration 120/120  loss nan",
    ]


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, quiet=True) as shown:
        assert not any(shown.is_due(step) for step in range(1, 11))
        shown.show(1, 1.0)
        shown.note("hello")
    assert capsys.readouterr().out == ""


def test_a_wrong_interval_is_an_error() -> None:
    with pytest.raises(ValueError, match="every_steps=0: choose at least 1 step"):
        Progress(10, every_steps=0)


# On a terminal


class Screen:
    """A pseudo-terminal of a chosen width, and what was written to it."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        self._theirs_number = theirs
        self.stream = os.fdopen(theirs, "w")
        self.resize(110)

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
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen()
    yield screen
    with suppress(OSError):
        screen.read()


def frames(written: str) -> list[str]:
    """What was drawn, one text per drawing, without bars and repetitions."""
    drawn = [re.sub(r"[━╸╺]+ |\x1b\[2K|\x1b\[1A|\n", "", text).strip() for text in written.split("\r")]
    return list(dict.fromkeys(filter(None, drawn)))


def test_a_terminal_has_a_bar_that_is_redrawn_in_place(clock: Clock, screen: Screen) -> None:
    with Progress(50, stream=screen.stream) as shown:
        assert shown.is_due(1)
        shown.show(1, 2.0, **RATES)
        assert not shown.is_due(2)
        clock.now_s += 2 * progress.LIVE_INTERVAL_S
        assert shown.is_due(2)
        shown.show(2, 1.0)
        shown.note("step 2: evaluation loss 1.5")
        screen.resize(20)
        shown.show(50, 0.5, **RATES)
    written = screen.read()
    assert "╸" + 30 * " " in written
    assert frames(written) == [
        "1/50  loss 2  812 samples/s  52.1k tokens/s  shares 6:2  waiting 1%:12%",
        "2/50  loss 1  19 s left",
        "step 2: evaluation loss 1.5",
        "50/50",
    ]
    assert written.endswith("\r\x1b[1A\x1b[2K"), "the bar is removed"
    assert HIDE_CURSOR not in written, "a hidden cursor stays hidden after a kill"


def test_kept_lines_stay_above_the_bar(clock: Clock, screen: Screen) -> None:
    with Progress(20, every_steps=10, keep_lines=True, stream=screen.stream) as shown:
        shown.show(1, 0.5)
        assert not shown.is_due(2)
        assert shown.is_due(10)
        clock.now_s += 8.0
        assert shown.is_due(5)
        shown.show(5, 0.25)
    assert frames(screen.read()) == ["step  1/20  loss 0.5", "1/20  loss 0.5", "5/20  loss 0.25  30 s left"]


def test_after_an_error_the_bar_is_gone(screen: Screen) -> None:
    with pytest.raises(RuntimeError), Progress(50, stream=screen.stream) as shown:
        shown.show(1, 2.0)
        raise RuntimeError
    assert screen.read().endswith("\x1b[1A\x1b[2K")


def test_a_terminal_without_a_bar_gets_plain_lines(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Progress(5, stream=screen.stream) as shown:
        shown.show(1, 2.0)
    assert screen.read() == "step 1/5  loss 2\r\n"


# Rates between two reports


def test_rates_are_those_since_the_last_look(clock: Clock) -> None:
    meter = RateMeter(2)
    for _ in range(4):
        clock.now_s += 0.5
        meter.add(16, (3, 1), [Timing(0.1, 0.1, 0.05, 0.04), Timing(0.1, 0.2, 0.05, feed=0.1)], num_tokens=100)
    found = meter.take()
    assert (found.samples_per_s, found.tokens_per_s, found.shares) == (32.0, 200.0, (12, 4))
    assert found.waiting == pytest.approx((0.0, 0.4))
    assert found.lanes["computing"] == pytest.approx((3 * 0.06 / 0.5, 0.1 / 0.5))
    assert found.lanes["data"] == pytest.approx((3 * 0.04 / 0.5, 0.0))
    assert found.lanes["exchange"] == pytest.approx((0.2, 0.2))
    assert found.lanes["rest"] == pytest.approx((0.2, 0.2))
    assert found.speeds == pytest.approx((10.0, 10.0))
    assert found.efficiency == pytest.approx(8.0 / 20.0)
    clock.now_s += 1.0
    meter.add(8, (2, 2))
    meter.add(24, (2, 2), num_tokens=240)  # the tokens of the step before are unknown
    assert meter.take().tokens_per_s == 320.0
    clock.now_s += 1.0
    meter.add(8, (2, 2))
    again = meter.take()
    assert (again.samples_per_s, again.tokens_per_s, again.shares, again.waiting) == (8.0, None, (2, 2), (0.0, 0.0))


def test_lanes_without_a_measurement_are_empty_and_later_ones_use_the_last(clock: Clock) -> None:
    meter = RateMeter(1)
    clock.now_s += 1.0
    meter.add(8, (4,), [Timing()])
    assert (meter.take().lanes, meter.take().efficiency) == ({}, None)
    for timing in (Timing(0.1), Timing()):
        clock.now_s += 0.5
        meter.add(8, (4,), [timing])
    assert meter.take().lanes["computing"] == pytest.approx((0.8,))


def test_lanes_add_up_to_one_if_measurements_lag_behind(clock: Clock) -> None:
    meter = RateMeter(1)
    clock.now_s += 0.5
    meter.add(8, (4,), [Timing(0.25, 0.5)])
    found = meter.take()
    assert {name: parts[0] for name, parts in found.lanes.items()} == pytest.approx(
        {"computing": 1 / 1.5, "data": 0.0, "exchange": 0.5 / 1.5, "rest": 0.0}
    )


def test_workers_that_leave_are_counted_no_more(clock: Clock) -> None:
    meter = RateMeter(3)
    meter.add(8, (1, 1, 1), [Timing(0.1)] * 3)
    clock.now_s += 1.0
    meter.add(8, (2, 1), [Timing(0.1)] * 2)
    assert meter.take().shares == (2, 1)
