"""Work that goes on while its starter does something else: in a thread of this process, or on workers it starts.

The work is a function that is handed a `Post`: there it leaves messages for the starter, and sees whether it is to
stop. Of the workers that are started, rank 0 does so for all; what lies between them and the starter is a folder with
a file of JSON lines, and one that says stop by being there.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from paceline.core.errors import MisuseError
from paceline.core.private_folder import new_private_folder
from paceline.core.world import World
from paceline.observe.json_lines import LineReader, LineWriter
from paceline.run.launching.launch import FOLDER_PREFIX, LOCK_FILE, launch

logger = logging.getLogger("paceline")

POLL_S = 0.05

# Held by the one run that may be under way in a thread: torch's random generators and settings are the process's.
_this_process = threading.Lock()

Message = Mapping[str, Any]


class Post(Protocol):
    """A worker's end."""

    def send(self, message: Message) -> None:
        """Leave a message of plain values, as JSON knows them."""

    def is_stop_asked(self) -> bool:
        """Whether the work is to end soon. Cheap: asked after every step."""


class Background:
    """Runs `work(post)` on `num_workers` workers from now on; 1: in a thread, else in processes of their own.

    Nothing is left of it when it has ended. Daemon threads: whoever owns this calls `end` before the interpreter exits.
    """

    def __init__(self, work: Callable[[Post], Any], num_workers: int) -> None:
        if num_workers == 1 and not _this_process.acquire(blocking=False):
            raise MisuseError(
                "another run is under way in this process, and the two would draw from the same random generators: "
                "join or stop it first"
            )
        # What a Ctrl-C may interrupt is plain values, a lock and this queue: one that hits inside an Event leaves its
        # lock locked for ever.
        self._messages: SimpleQueue[Message | None] = SimpleQueue()  # None: it has ended
        self._is_stop_asked = self._is_kill_asked = False
        self.has_ended = False
        self._running = threading.Lock()
        self._running.acquire()
        self._result: Any = None
        self.error: BaseException | None = None
        self.is_told = False  # somebody has asked for the result
        self._thread = threading.Thread(
            target=self._run, args=(work, num_workers), name="paceline-background", daemon=True
        )
        self._thread.start()

    def next_message(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None when there will be none any more. Raises `queue.Empty` after `timeout_s`."""
        if self.has_ended and self._messages.empty():
            return None
        message = self._messages.get(timeout=timeout_s)
        if message is None:
            self._messages.put(None)  # others may be waiting too
        return message

    def new_messages(self) -> list[Message]:
        """What has come since the last call, without waiting."""
        messages = []
        with suppress(Empty):
            while (message := self.next_message(timeout_s=0)) is not None:
                messages.append(message)
        return messages

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it ends within the time. What it held is then released."""
        if threading.current_thread() is self._thread:
            return False  # it is asked to wait for itself
        # Not the thread's `join`, a Ctrl-C in which makes Python 3.11 believe that the thread has ended.
        if not self.has_ended:
            if not self._running.acquire(timeout=-1 if timeout_s is None else timeout_s):
                return False
            self._running.release()
        self._thread.join()
        return True

    def result(self) -> Any:
        """What rank 0's work returned, or its error: after the end."""
        self.is_told = True
        if self.error is not None:
            raise self.error
        return self._result

    def stop(self) -> None:
        """Ask it to end soon."""
        self._is_stop_asked = True

    def kill(self) -> None:
        """End it in whatever it does, if it runs in processes of its own; a thread can only be asked."""
        self.stop()
        self._is_kill_asked = True

    def end(self, grace_s: float) -> None:
        """Ask it to end, and see that it does. An error that came before is logged: nobody else will tell."""
        if self.error is not None and not self.is_told and not self._is_kill_asked:
            logger.error("a run in the background failed, and nobody asked how it ended", exc_info=self.error)
        self.stop()
        if not self.wait(grace_s):
            self.kill()
            self.wait(grace_s)

    def _run(self, work: Callable[[Post], Any], num_workers: int) -> None:
        try:
            if num_workers == 1:
                self._result = work(_QueuePost(self._messages, lambda: self._is_stop_asked))
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

    def _launch(self, work: Callable[[Post], Any], num_workers: int) -> Any:
        is_over = threading.Event()
        with _folder() as folder:
            (folder / _FolderPost.MESSAGES).touch()
            relay = threading.Thread(target=self._relay, args=(folder, is_over), name="paceline-relay", daemon=True)
            relay.start()
            try:
                return launch(_work_with_post, num_workers, args=(work, folder))
            finally:
                is_over.set()
                relay.join()

    def _relay(self, folder: Path, is_over: threading.Event) -> None:
        """Carry the workers' messages here, and the wish to stop there."""
        reader = LineReader(folder / _FolderPost.MESSAGES)
        while True:
            is_last = is_over.wait(POLL_S)
            for message in reader.read():
                self._messages.put(message)
            if is_last:
                return
            if self._is_stop_asked:
                (folder / _FolderPost.STOP).touch()
            if self._is_kill_asked:
                _kill_workers(folder)


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder that is gone at the end; after a SIGKILL of this process the next launch removes it with its own."""
    folder = new_private_folder(FOLDER_PREFIX)
    try:
        unfinished = folder / f"{LOCK_FILE}.new"
        with unfinished.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unfinished.rename(folder / LOCK_FILE)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _QueuePost:
    """In the process that asked for the work."""

    def __init__(self, messages: SimpleQueue[Message | None], is_stop_asked: Callable[[], bool]) -> None:
        self._messages = messages
        self.is_stop_asked = is_stop_asked

    def send(self, message: Message) -> None:
        self._messages.put(message)


class _FolderPost:
    """In a worker: files that the starter looks at."""

    MESSAGES, STOP, PIDS = "messages.jsonl", "stop", "pid-*"

    def __init__(self, folder: Path) -> None:
        self._stop = str(folder / self.STOP)
        self._lines = LineWriter(folder / self.MESSAGES)

    def send(self, message: Message) -> None:
        self._lines.write(message)

    def is_stop_asked(self) -> bool:
        return os.path.exists(self._stop)  # noqa: PTH110 (a microsecond, in every step; a Path takes ten)

    def close(self) -> None:
        self._lines.close()


class _Listener:
    """The post of the other workers, for whom rank 0 speaks and listens."""

    def send(self, message: Message) -> None:
        return

    def is_stop_asked(self) -> bool:
        return False


def _work_with_post(work: Callable[[Post], Any], folder: Path) -> Any:
    own_pid = folder / f"pid-{os.getpid()}"
    own_pid.touch()
    try:
        if not World.from_environment("cpu").is_main:
            return work(_Listener())
        post = _FolderPost(folder)
        try:
            return work(post)
        finally:
            post.close()
    finally:
        own_pid.unlink(missing_ok=True)


def _kill_workers(folder: Path) -> None:
    for path in folder.glob(_FolderPost.PIDS):
        with suppress(OSError):  # gone already
            os.kill(int(path.name.removeprefix("pid-")), signal.SIGKILL)
