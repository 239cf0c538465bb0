"""Reading in the background: in a thread, or in processes of its own for code of the user's.

Both take requests in order and answer each; a request nobody wants any more is answered and thrown away.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import stat
import struct
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.core.errors import PacelineError
from paceline.data.packing import Packed, pack, unpack

_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("<Q")


class Readers(Protocol):
    """`read` of whoever made it, called with each request somewhere else."""

    def submit(self, request: Hashable) -> Callable[[], Any]:
        """Start on a request; calling the result waits for the answer, or raises what `read` raised."""

    def close(self) -> None: ...


class ReaderThread:
    """For sources that run no code of the user's: it shares this process's random generators."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="paceline-reader")

    def submit(self, request: Hashable) -> Callable[[], Any]:
        future: Future[Any] = self._pool.submit(self._read, request)
        return future.result

    def close(self) -> None:
        # What was asked for is done to its end: where workers read together, another waits for our part of it.
        self._pool.shutdown(wait=True)


class ReaderProcesses:
    """Forked processes, each with a copy of everything `read` needs; they end with this process, however it ends."""

    def __init__(self, read: Callable[[Any], Any], count: int) -> None:
        if count < 1:
            raise ValueError(f"readers={count}: choose at least 1 reader process, or 0 to read in the step")
        self._readers = [_ReaderProcess(read, number) for number in range(count)]

    def submit(self, request: Hashable, reader: int | None = None) -> Callable[[], Any]:
        """To the reader with this number; else to the one with least to do."""
        chosen = min(self._readers, key=lambda r: r.num_open) if reader is None else self._readers[reader]
        return chosen.submit(request)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


class ReaderDied(PacelineError):
    """A reader process ended without an answer."""


class _ReaderProcess:
    """One process and the socket to it. It answers in the order of the requests."""

    def __init__(self, read: Callable[[Any], Any], number: int) -> None:
        self._number = number
        self._socket, theirs = socket.socketpair()
        self._pid = _fork(lambda: _serve(theirs, read))
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

    def forget(self, number: int) -> None:
        """Nobody will ask for this answer."""
        if number >= self._answered:
            self._unwanted.add(number)
            return
        for answer in [a for a in self._answers if a[0] == number]:
            self._answers.remove(answer)
            _close(answer[2])

    def close(self) -> None:
        self._socket.close()
        self._end()
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


def _serve(connection: socket.socket, read: Callable[[Any], Any]) -> None:
    _close_sockets(connection)
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
