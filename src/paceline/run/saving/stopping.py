"""Ending a run when asked to: the step is finished, the state saved, the process left with a code that says so."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

from paceline.run.launching.worker import HEARD_VARIABLE, STOPPED_EXIT_CODE

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(SystemExit):
    """The run was asked to stop, and did after `step`, which is saved if the run is. Uncaught: exit code 75."""

    def __init__(self, step: int = 0) -> None:
        super().__init__(STOPPED_EXIT_CODE)
        self.step = step


class StopSignals:
    """Turns the first SIGTERM or SIGINT into `is_asked`; a second one ends the process at once.

    A handler that the user has set stays, and so does an ignored signal; only the main thread can set any. `close`
    puts back what was there.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            usual = (signal.SIG_DFL, signal.default_int_handler)
            self._before = {number: signal.getsignal(number) for number in _SIGNALS}
            self._before = {number: handler for number, handler in self._before.items() if handler in usual}
        for number in self._before:
            signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.is_asked = True
        # The kernel's own: a second signal must work while Python waits inside an exchange.
        for handled in self._before:
            signal.signal(handled, signal.SIG_DFL)
        if path := os.environ.get(HEARD_VARIABLE):
            with suppress(OSError):
                Path(path).touch()
        name = signal.Signals(number).name
        # Only what is true whoever sent it: a launcher also ends in this way the workers that outlive another one.
        text = (
            f"paceline: {name}: stopping after this step, which is saved if all workers complete it; again to end at "
            "once\n"
        )
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
