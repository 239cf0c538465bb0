"""Stops a run on request: the step is finished, the state saved, and the process exits with code 75."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from paceline.run.launching.worker import ANNOUNCED_FILE, HEARD_VARIABLE, STOPPABLE_FILE, STOPPED_EXIT_CODE

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(SystemExit):
    """The run stopped on request after `step`, which was saved if the run has checkpoints. Uncaught: exit code 75."""

    def __init__(self, step: int = 0) -> None:
        super().__init__(STOPPED_EXIT_CODE)
        self.step = step


class StopSignals:
    """Calls `request_stop` on the first SIGTERM, SIGINT or SIGHUP. A second signal ends the process immediately.

    But not SIGHUP: when a login session ends, systemd sends it right after SIGTERM.

    The user's handlers and ignored signals are left alone; handlers can only be set in the main thread. `close`
    restores the previous handlers.
    """

    def __init__(self, request_stop: Callable[[], None]) -> None:
        self.is_requested = False
        self._request_stop = request_stop
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            defaults = (signal.SIG_DFL, signal.default_int_handler)
            handlers = {number: signal.getsignal(number) for number in _SIGNALS}
            self._previous = {number: handler for number, handler in handlers.items() if handler in defaults}
        for number in self._previous:
            signal.signal(number, self._handle)
        if self._previous and (path := os.environ.get(HEARD_VARIABLE)):
            with suppress(OSError):
                Path(path).with_name(STOPPABLE_FILE).touch()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.is_requested = True
        self._request_stop()
        path = os.environ.get(HEARD_VARIABLE)
        if path is not None:
            with suppress(OSError):
                Path(path).touch()  # first: from now on the agent sends no second signal
        for handled in self._previous:
            if handled == signal.SIGHUP:
                signal.signal(handled, signal.SIG_IGN)
            elif number != signal.SIGHUP:  # the kernel's action: it must work while Python waits inside an exchange
                signal.signal(handled, signal.SIG_DFL)
        if path is not None and Path(path).with_name(ANNOUNCED_FILE).exists():
            return  # sent by the agent, which has printed why
        # A launcher sends the same signal to the survivors of a dead worker, whose step cannot be completed.
        text = (
            f"paceline: {signal.Signals(number).name}: stopping after this step, which is saved if all workers "
            "complete it; send it again to exit immediately\n"
        )
        with suppress(OSError, ValueError):  # not `notice`: a signal may interrupt another print
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
