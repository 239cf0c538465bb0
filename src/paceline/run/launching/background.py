"""Runs work in the background: in a thread of this process, or on workers started for it.

The work is a function that receives a `Channel`, through which it sends messages to the caller and sees whether it
should stop; with several workers rank 0 does so for all.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from paceline.core.errors import MisuseError
from paceline.observe.json_lines import LineReader, LineWriter
from paceline.run.launching.launch import Launch, launch_workers, run_folder

logger = logging.getLogger("paceline")

# Between processes the channel is a folder with a file of JSON lines and, once a stop is requested, an empty file.
MESSAGES_FILE = "messages.jsonl"
STOP_FILE = "stop"

# Held by the one run that may be in a thread: torch's random generators and settings belong to the process.
_this_process = threading.Lock()

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Channel:
    """The worker's end. On ranks other than 0 it does nothing."""

    send: Callable[[Message], object] = lambda _: None  # a message of JSON values
    is_stop_requested: Callable[[], bool] = lambda: False  # cheap enough to call after every step


class Background:
    """Runs `work(channel)` on `num_workers` workers, starting now: 1 in a thread, several in processes.

    The threads are daemons: the owner calls `end` before the interpreter exits.
    """

    def __init__(self, work: Callable[[Channel], Any], num_workers: int) -> None:
        if num_workers == 1 and not _this_process.acquire(blocking=False):
            raise MisuseError(
                "another run is active in this process, and both would use the same random generators: join or stop "
                "it first"
            )
        # A Ctrl-C may interrupt any method. Interrupting an Event can leave its lock held, so there is none here.
        self._messages: SimpleQueue[Message | None] = SimpleQueue()  # None: the work has ended
        self._is_stop_requested = self._is_kill_requested = False
        self.has_ended = False
        self._running = threading.Lock()
        self._running.acquire()
        self._result: Any = None
        self.error: BaseException | None = None
        self.is_result_requested = False
        self._thread = threading.Thread(
            target=self._run, args=(work, num_workers), name="paceline-background", daemon=True
        )
        self._thread.start()

    def next_message(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None after the last one. Raises `queue.Empty` after `timeout_s`."""
        if self.has_ended and self._messages.empty():
            return None
        message = self._messages.get(timeout=timeout_s)
        if message is None:
            self._messages.put(None)  # for other threads that wait
        return message

    def new_messages(self) -> list[Message]:
        """The messages since the last call, without waiting."""
        messages = []
        with suppress(Empty):
            while (message := self.next_message(timeout_s=0)) is not None:
                messages.append(message)
        return messages

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, at most `timeout_s`. Returns whether it has ended."""
        if threading.current_thread() is self._thread:
            return False
        # Not Thread.join: after a Ctrl-C in it, Python 3.11 marks the thread as ended.
        if not self.has_ended:
            if not self._running.acquire(timeout=-1 if timeout_s is None else timeout_s):
                return False
            self._running.release()
        self._thread.join()
        return True

    def result(self) -> Any:
        """The return value of rank 0's work, or raise its error. Call it after the end."""
        self.is_result_requested = True
        if self.error is not None:
            raise self.error
        return self._result

    def stop(self) -> None:
        """Ask it to end soon."""
        self._is_stop_requested = True

    def kill(self) -> None:
        """Kill it if it runs in processes; a thread can only be asked to stop."""
        self.stop()
        self._is_kill_requested = True

    def end(self, grace_s: float) -> None:
        """Stop it, kill it after `grace_s`, and log an error that `result` has not raised."""
        if self.error is not None and not self.is_result_requested and not self._is_kill_requested:
            logger.error("a run in the background failed, and its result was not requested", exc_info=self.error)
        self.stop()
        if not self.wait(grace_s):
            self.kill()
            self.wait(grace_s)

    def _run(self, work: Callable[[Channel], Any], num_workers: int) -> None:
        try:
            if num_workers == 1:
                self._result = work(Channel(self._messages.put, lambda: self._is_stop_requested))
            else:
                self._result = self._run_on_workers(work, num_workers)
        except BaseException as error:
            self.error = error
        finally:
            if num_workers == 1:
                _this_process.release()
            self.has_ended = True
            self._messages.put(None)
            self._running.release()

    def _run_on_workers(self, work: Callable[[Channel], Any], num_workers: int) -> Any:
        with run_folder() as folder:
            (folder / MESSAGES_FILE).touch()
            reader = LineReader(folder / MESSAGES_FILE)

            def relay() -> bool:
                for message in reader.read():
                    self._messages.put(message)
                if self._is_stop_requested:
                    (folder / STOP_FILE).touch()
                return self._is_kill_requested

            try:
                return launch_workers(_run_on_worker, (work, folder), {}, Launch(num_workers), relay)
            finally:
                relay()


def _run_on_worker(work: Callable[[Channel], Any], folder: Path) -> Any:
    if os.environ["RANK"] != "0":
        return work(Channel())
    with closing(LineWriter(folder / MESSAGES_FILE)) as lines:
        # Not Path.exists, which takes ten times as long.
        return work(Channel(lines.write, partial(os.path.exists, str(folder / STOP_FILE))))
