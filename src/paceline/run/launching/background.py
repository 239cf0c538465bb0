"""Runs work in the background: in a thread of this process, or on workers started for it.

The work is a function that receives a `Channel`, through which it sends messages to the caller and sees whether it
should stop. On started workers rank 0 does both for all. The channel is then a folder with a file of JSON lines and,
once a stop is requested, an empty file.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from paceline.core.errors import MisuseError
from paceline.observe.json_lines import LineReader, LineWriter
from paceline.run.launching.launch import launch_workers, run_folder

logger = logging.getLogger("paceline")

POLL_S = 0.05
MESSAGES_FILE = "messages.jsonl"
STOP_FILE = "stop"

# Held by the one run that may be in a thread: torch's random generators and settings belong to the process.
_this_process = threading.Lock()

Message = Mapping[str, Any]


class Channel(Protocol):
    """The worker's end."""

    def send(self, message: Message) -> None:
        """Send a message of JSON values."""

    def is_stop_requested(self) -> bool:
        """Whether the work should end soon. Cheap enough to call after every step."""


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
        self.is_told = False  # the result was asked for
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
        """Wait for the end, at most `timeout_s`. Whether it has ended."""
        if threading.current_thread() is self._thread:
            return False
        # Not Thread.join: after a Ctrl-C in it Python 3.11 believes that the thread has ended.
        if not self.has_ended:
            if not self._running.acquire(timeout=-1 if timeout_s is None else timeout_s):
                return False
            self._running.release()
        self._thread.join()
        return True

    def result(self) -> Any:
        """What rank 0's work returned; its error is raised. Call it after the end."""
        self.is_told = True
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
        if self.error is not None and not self.is_told and not self._is_kill_requested:
            logger.error("a run in the background failed, and its result was not requested", exc_info=self.error)
        self.stop()
        if not self.wait(grace_s):
            self.kill()
            self.wait(grace_s)

    def _run(self, work: Callable[[Channel], Any], num_workers: int) -> None:
        try:
            if num_workers == 1:
                self._result = work(_QueueChannel(self._messages, lambda: self._is_stop_requested))
            else:
                self._result = self._launch(work, num_workers)
        except BaseException as error:
            self.error = error
        finally:
            if num_workers == 1:
                _this_process.release()
            self.has_ended = True
            self._messages.put(None)
            self._running.release()

    def _launch(self, work: Callable[[Channel], Any], num_workers: int) -> Any:
        is_over = threading.Event()
        with run_folder() as folder:
            relay = threading.Thread(target=self._relay, args=(folder, is_over), name="paceline-relay", daemon=True)
            (folder / MESSAGES_FILE).touch()
            relay.start()
            try:
                return launch_workers(
                    _work_with_channel, num_workers, (work, folder), is_cancelled=lambda: self._is_kill_requested
                )
            finally:
                is_over.set()
                relay.join()

    def _relay(self, folder: Path, is_over: threading.Event) -> None:
        """Pass on the workers' messages to the caller, and the request to stop to the workers."""
        reader = LineReader(folder / MESSAGES_FILE)
        is_last = False
        while not is_last:
            is_last = is_over.wait(POLL_S)
            for message in reader.read():
                self._messages.put(message)
            if self._is_stop_requested:
                (folder / STOP_FILE).touch()


class _QueueChannel:
    """In a thread of the caller's process."""

    def __init__(self, messages: SimpleQueue[Message | None], is_stop_requested: Callable[[], bool]) -> None:
        self.send = messages.put
        self.is_stop_requested = is_stop_requested


class _FileChannel:
    """In a worker. The channel of every rank but 0 does nothing."""

    def __init__(self, folder: Path) -> None:
        self._stop = str(folder / STOP_FILE)
        self._lines = LineWriter(folder / MESSAGES_FILE) if os.environ["RANK"] == "0" else None

    def send(self, message: Message) -> None:
        if self._lines is not None:
            self._lines.write(message)

    def is_stop_requested(self) -> bool:
        return self._lines is not None and os.path.exists(self._stop)  # noqa: PTH110 (a Path takes ten times as long)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def _work_with_channel(work: Callable[[Channel], Any], folder: Path) -> Any:
    channel = _FileChannel(folder)
    try:
        return work(channel)
    finally:
        channel.close()
