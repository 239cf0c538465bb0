"""Reading in the background: in a thread, or in processes of its own for code of the user's.

Both take requests in order and answer each; a request nobody wants any more is answered and thrown away.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import pickle
import select
import signal
import socket
import stat
import struct
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from paceline.core.errors import PacelineError
from paceline.data.feeds.packing import Packed, pack, unpack

_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("<Q")
# A reader process that is asked where it stands writes its stack to a file.
_STACK_SIGNAL = signal.SIGUSR1
_STACK_WAIT_S = 1.0
_GIVE_UP_S = 5.0  # for a thread whose waiting was ended


class Readers(Protocol):
    """`read` of whoever made it, called with each request somewhere else."""

    def submit(self, request: Hashable) -> Callable[[], Any]:
        """Start on a request; calling the result waits for the answer, or raises what `read` raised."""

    def close(self) -> None: ...


class ReaderThread:
    """For sources that run no code of the user's: it shares this process's random generators.

    Whoever asks for an answer waits at most `timeout_s` for it; until somebody does, the thread may take any time.
    `give_up` lets go what the thread waits for, if it has to end; `explain` makes the error of a wait in vain, where it
    knows what the thread waits for.
    """

    def __init__(
        self,
        read: Callable[[Any], Any],
        timeout_s: float = math.inf,
        *,
        give_up: Callable[[], None] = lambda: None,
        explain: Callable[[], PacelineError | None] = lambda: None,
    ) -> None:
        self._read = read
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._explain = explain
        self._requests: SimpleQueue[tuple[Future[Any], Hashable] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stuck = False

    def submit(self, request: Hashable) -> Callable[[], Any]:
        if self._thread is None:  # not before: until now this process may fork
            # A daemon: one that never ends must not keep the process.
            self._thread = threading.Thread(target=self._work, name="paceline-reader", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._requests.put((future, request))
        return partial(self._answer, future)

    def close(self) -> None:
        if self._thread is None:
            return
        self._requests.put(None)
        # What was asked for is done to its end: where workers read together, another waits for our part of it.
        self._thread.join(0.0 if self._is_stuck else min(self._timeout_s, threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            self._give_up()
            self._thread.join(_GIVE_UP_S)

    def _work(self) -> None:
        while (asked := self._requests.get()) is not None:
            future, request = asked
            try:
                future.set_result(self._read(request))
            except BaseException as error:
                future.set_exception(error)
            del future, asked  # an answer that nobody wants must not live until the next request

    def _answer(self, future: Future[Any]) -> Any:
        try:
            return future.result(min(self._timeout_s, threading.TIMEOUT_MAX))
        except TimeoutError:
            if future.done():  # raised by the reading itself
                raise
        self._is_stuck = True
        raise self._explain() or ReaderTimeout(
            f"waited timeout_s={self._timeout_s:g} s for data that is read in the background. The thread that reads "
            f"stands at:\n{_stack_of(self._thread)}"
        )


def _stack_of(thread: threading.Thread | None) -> str:
    frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "(it has ended)"


class ReaderProcesses:
    """Forked processes, each with a copy of everything `read` needs; they end with this process, however it ends.

    Whoever asks for an answer waits at most `timeout_s` for it.
    """

    def __init__(self, read: Callable[[Any], Any], count: int, timeout_s: float = math.inf) -> None:
        if count < 1:
            raise ValueError(f"readers={count}: choose at least 1 reader process, or 0 to read in the step")
        self._readers = [_ReaderProcess(read, number, timeout_s) for number in range(count)]

    def submit(self, request: Hashable, reader: int | None = None) -> Callable[[], Any]:
        """To the reader with this number; else to the one with least to do."""
        chosen = min(self._readers, key=lambda r: r.num_open) if reader is None else self._readers[reader]
        return chosen.submit(request)

    def stacks(self) -> str:
        """Where those stand that have something to do."""
        return "\n".join(reader.stack() for reader in self._readers if reader.num_open)

    def kill(self) -> None:
        """Let a thread that waits for an answer go on, with an error."""
        for reader in self._readers:
            reader.kill()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


class ReaderDied(PacelineError):
    """A reader process ended without an answer."""


class ReaderTimeout(PacelineError):
    """Data that a step needs was not read within the run's time-out."""

    @classmethod
    def of_stacks(cls, timeout_s: float, stacks: str) -> ReaderTimeout:
        return cls(
            f"waited timeout_s={timeout_s:g} s for data: the data set hangs, or takes longer than that. {stacks}"
        )


class _ReaderProcess:
    """One process and the socket to it. It answers in the order of the requests."""

    def __init__(self, read: Callable[[Any], Any], number: int, timeout_s: float) -> None:
        self._number = number
        self._timeout_s = timeout_s
        self._socket, theirs = socket.socketpair()
        # Where it writes its stack.
        self._stack_file: int | None = os.memfd_create("paceline-stack", os.MFD_CLOEXEC)
        self._pid = _fork(partial(_serve, theirs, read, self._stack_file))
        theirs.close()
        self._asked = self._answered = 0
        self._answers: deque[tuple[int, bytes, int | None]] = deque()
        self._unwanted: set[int] = set()

    @property
    def num_open(self) -> int:
        return self._asked - self._answered

    def submit(self, request: Hashable) -> Callable[[], Any]:
        number, self._asked = self._asked, self._asked + 1
        try:
            _send(self._socket, pickle.dumps(request))
        except OSError as error:
            raise self._died() from error
        return _Answer(self, number)

    def answer(self, number: int) -> Any:
        while number >= self._answered:
            try:
                self._wait_for_answer()
                message, descriptor = _receive(self._socket)
            except (OSError, EOFError) as error:
                raise self._died() from error
            self._keep(message, descriptor)
        found = next(i for i, (n, _, _) in enumerate(self._answers) if n == number)
        _, message, descriptor = self._answers[found]
        del self._answers[found]
        outcome, value = pickle.loads(message)
        if outcome == "error":
            raise value
        return unpack(value, descriptor)

    def _wait_for_answer(self) -> None:
        if self._timeout_s == math.inf or select.select([self._socket], [], [], self._timeout_s)[0]:
            return
        raise ReaderTimeout.of_stacks(self._timeout_s, self.stack())

    def stack(self) -> str:
        """Where the process stands, as a sentence."""
        if self._pid is None or self._stack_file is None:
            return f"Reader process {self._number} has ended"
        os.kill(self._pid, _STACK_SIGNAL)  # it may be dead already, but not yet waited for
        deadline_s = time.monotonic() + _STACK_WAIT_S
        text = ""
        while time.monotonic() < deadline_s and not text.endswith("\n"):
            time.sleep(0.02)
            text = os.pread(self._stack_file, 1 << 16, 0).decode(errors="replace")
        if not text:
            return f"Reader process {self._number} (pid {self._pid}) does not say where it stands: it was stopped"
        return f"Reader process {self._number} stands at (most recent call first):\n{text.partition(':')[2].strip()}"

    def forget(self, number: int) -> None:
        """Nobody will ask for this answer."""
        if number >= self._answered:
            self._unwanted.add(number)
            return
        for answer in [a for a in self._answers if a[0] == number]:
            self._answers.remove(answer)
            _close(answer[2])

    def kill(self) -> None:
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        self._socket.close()
        self._end()
        if self._stack_file is not None:
            os.close(self._stack_file)
            self._stack_file = None
        for _, _, descriptor in self._answers:
            _close(descriptor)
        self._answers.clear()

    def _end(self) -> int:
        """Its exit code, negative for a signal; -SIGKILL if it has to be told to end."""
        if self._pid is None:
            return 0
        pid, self._pid = self._pid, None
        os.kill(pid, signal.SIGKILL)  # it may be dead already, but not yet waited for
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _keep(self, message: bytes, descriptor: int | None) -> None:
        number, self._answered = self._answered, self._answered + 1
        if number in self._unwanted:
            self._unwanted.remove(number)
            _close(descriptor)
        else:
            self._answers.append((number, message, descriptor))

    def _died(self) -> ReaderDied:
        code = self._end()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ReaderDied(
            f"reader process {self._number} {how}: if the kernel killed it for its memory, choose fewer readers or a "
            "smaller prefetch"
        )


class _Answer:
    """What `submit` returns. Dropping it tells the reader that nobody wants the answer."""

    def __init__(self, reader: _ReaderProcess, number: int) -> None:
        self._reader = reader
        self._number = number
        self._is_taken = False

    def __call__(self) -> Any:
        self._is_taken = True
        return self._reader.answer(self._number)

    def __del__(self) -> None:
        if not self._is_taken:
            self._reader.forget(self._number)


def _fork(run: Callable[[], None]) -> int | None:
    """A copy of this process that runs one function; the copy's pid.

    A fork, as torch's DataLoader does: data sets need not be picklable, and nothing is imported again. Not through
    multiprocessing, which refuses it to workers that were started as daemons.
    """
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads do not survive a fork; ours needs none
        pid = os.fork()
    if pid:
        return pid
    try:
        _separate(parent)
        run()
    finally:
        os._exit(0)


def _serve(connection: socket.socket, read: Callable[[Any], Any], stack_file: int) -> None:
    _close_sockets(connection)
    faulthandler.register(_STACK_SIGNAL, stack_file, all_threads=False)
    while True:
        try:
            request = pickle.loads(_receive(connection)[0])
        except (OSError, EOFError):
            return
        packed: Packed | None = None
        try:
            value, packed = pack(read(request))
            message = pickle.dumps(("batch", value))
        except BaseException as error:
            message = pickle.dumps(("error", _portable(error)))
        try:
            _send(connection, message, None if packed is None else packed.descriptor)
        except OSError:
            return
        finally:
            if packed is not None:
                packed.close()


def _separate(parent: int) -> None:
    """What a fork inherits and must not keep: a life of its own, signals, threads."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # the parent ended before the line above
    # The worker decides what these mean; it may need its readers to finish a step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)  # the parent's pool of threads does not exist here


def _close_sockets(ours: socket.socket) -> None:
    """A peer notices this worker's death by its connections closing, which copies of them here would delay."""
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            if number > 2 and number != ours.fileno() and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)


def _portable(error: BaseException) -> BaseException:
    """The error as it can be sent, with the traceback that would be lost."""
    text = "".join(traceback.format_exception(error))
    try:
        error.add_note(f"in a reader process:\n{text}")
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"in a reader process:\n{text}")
    return error


def _send(connection: socket.socket, message: bytes, descriptor: int | None = None) -> None:
    header = _LENGTH.pack(len(message))
    if descriptor is None:
        connection.sendall(header)
    else:
        socket.send_fds(connection, [header], [descriptor])
    connection.sendall(message)


def _receive(connection: socket.socket) -> tuple[bytes, int | None]:
    header, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    while len(header) < _LENGTH.size:
        header += _read_some(connection, _LENGTH.size - len(header))
    (length,) = _LENGTH.unpack(header)
    message = bytearray()
    while len(message) < length:
        message += _read_some(connection, length - len(message))
    return bytes(message), descriptors[0] if descriptors else None


def _read_some(connection: socket.socket, count: int) -> bytes:
    part = connection.recv(min(count, 1 << 20))
    if not part:
        raise EOFError
    return part


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
