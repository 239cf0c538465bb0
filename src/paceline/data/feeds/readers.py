"""Reading in the background: in a thread, or in forked processes for user code."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from paceline.core.errors import PacelineError
from paceline.core.processes import die_with_parent
from paceline.data.errors import picklable
from paceline.data.feeds.packing import pack, unpack

# Longer timeouts are shortened to this one: some waiting functions refuse them.
NO_TIMEOUT_S = 7 * 24 * 3600.0

_STACK_SIGNAL = signal.SIGUSR1  # makes a reader process write its stack to a file
_STACK_TIMEOUT_S = 1.0
_ABORT_TIMEOUT_S = 5.0  # for a thread whose wait was aborted


class ReaderDied(PacelineError):
    """A reader process ended without an answer."""


class ReaderTimeout(PacelineError):
    """Data that a step needs was not read within the run's timeout."""

    @classmethod
    def in_processes(cls, timeout_s: float, stacks: str) -> ReaderTimeout:
        return cls(
            f"waited timeout_s={timeout_s:g} s for data: reading hangs, or takes longer than the timeout. {stacks}"
        )


@dataclass(eq=False)
class ReaderThread:
    """Reads in a thread. Only for sources without user code: the thread shares this process's random generators.

    Args:
        timeout_s: how long an awaited answer may take; a request that is not awaited yet may take any time.
        abort: called at `close` if the thread is stuck, to end what it waits for.
        explain: returns the error for a timeout if it knows what the thread waits for.
    """

    read: Callable[[Any], Any]
    timeout_s: float = NO_TIMEOUT_S
    _: KW_ONLY
    abort: Callable[[], None] = lambda: None
    explain: Callable[[], PacelineError | None] = lambda: None

    def __post_init__(self) -> None:
        self.timeout_s = min(self.timeout_s, NO_TIMEOUT_S)
        self._requests: SimpleQueue[tuple[Future[Any], Hashable] | None] = SimpleQueue()
        # A daemon thread, so that a stuck one does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="paceline-reader", daemon=True)
        self._is_stuck = False

    def submit(self, request: Hashable) -> Callable[[], Any]:
        """Start a request. Calling the result waits for the answer, or raises the read function's exception."""
        if self._thread.ident is None:  # started late: until now this process may fork
            self._thread.start()
        future: Future[Any] = Future()
        self._requests.put((future, request))
        return partial(self._answer, future)

    def close(self) -> None:
        if self._thread.ident is None:
            return
        self._requests.put(None)
        # Submitted requests are completed: other workers may be waiting for this worker's part of them.
        self._thread.join(0.0 if self._is_stuck else self.timeout_s)
        if self._thread.is_alive():
            self.abort()
            self._thread.join(_ABORT_TIMEOUT_S)

    def _work(self) -> None:
        while (item := self._requests.get()) is not None:
            future, request = item
            try:
                future.set_result(self.read(request))
            except BaseException as error:
                future.set_exception(error)
            del future, item  # a dropped answer must not stay alive until the next request

    def _answer(self, future: Future[Any]) -> Any:
        try:
            return future.result(self.timeout_s)
        except TimeoutError:
            if future.done():  # just now, or `read` has raised this
                return future.result()
        self._is_stuck = True
        frame = sys._current_frames().get(self._thread.ident or 0)
        raise self.explain() or ReaderTimeout(
            f"waited timeout_s={self.timeout_s:g} s for data that is read in the background. The reading thread is "
            f"at:\n{''.join(traceback.format_stack(frame)).rstrip() if frame else '(it has ended)'}"
        )


class ReaderProcesses:
    """Reads in forked processes, each with a copy of everything that `read` needs.

    They end with this process, even if it is killed. An awaited answer may take `timeout_s`.
    """

    def __init__(self, read: Callable[[Any], Any], count: int, timeout_s: float = NO_TIMEOUT_S) -> None:
        self._readers = [_ReaderProcess(read, number, min(timeout_s, NO_TIMEOUT_S)) for number in range(count)]

    def submit(self, request: Hashable, reader: int | None = None) -> Callable[[], Any]:
        """As in `ReaderThread`: to the reader with this number, or to the one with the fewest open requests."""
        chosen = min(self._readers, key=lambda r: len(r.open)) if reader is None else self._readers[reader]
        return chosen.submit(request)

    def stacks(self) -> str:
        """The stacks of the processes that have open requests."""
        return "\n".join(reader.stack() for reader in self._readers if reader.open)

    def kill(self) -> None:
        """Kill the processes, so that a thread that waits for an answer gets an error."""
        for reader in self._readers:
            reader.kill()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


class Prefetcher:
    """Keeps at most `depth` requests in flight. A request that was not expected is read on demand."""

    def __init__(self, readers: ReaderThread | ReaderProcesses, depth: int) -> None:
        self._readers = readers
        self._depth = depth
        self._in_flight: dict[Hashable, Callable[[], Any]] = {}

    def expect(self, upcoming: Iterable[Hashable]) -> None:
        """The next requests, in order. Earlier requests that are not among them are dropped."""
        wanted = list(islice(upcoming, self._depth))
        for request in self._in_flight.keys() - set(wanted):
            del self._in_flight[request]
        for request in wanted:
            if request not in self._in_flight:
                self._in_flight[request] = self._readers.submit(request)

    def take(self, request: Hashable) -> Any:
        answer = self._in_flight.pop(request, None) or self._readers.submit(request)
        return answer()

    def close(self) -> None:
        self._in_flight.clear()
        self._readers.close()


class _ReaderProcess:
    """One process and the connection to it. It answers requests in order."""

    def __init__(self, read: Callable[[Any], Any], number: int, timeout_s: float) -> None:
        self._number = number
        self._timeout_s = timeout_s
        self._connection, theirs = Pipe()
        self._stack_file = os.memfd_create("paceline-stack", os.MFD_CLOEXEC)
        self._pid: int | None = _fork(partial(_serve, theirs, read, self._stack_file))
        theirs.close()
        self.open: deque[weakref.ref[Future[Any]]] = deque()  # dead references: the answer is no longer wanted

    def submit(self, request: Hashable) -> Callable[[], Any]:
        future: Future[Any] = Future()
        self.open.append(weakref.ref(future))
        try:
            self._connection.send(request)
        except OSError as error:
            raise self._died() from error
        return partial(self._answer, future)

    def _answer(self, future: Future[Any]) -> Any:
        while not future.done():
            self._receive()
        return future.result()

    def _receive(self) -> None:
        try:
            if not self._connection.poll(self._timeout_s):
                raise ReaderTimeout.in_processes(self._timeout_s, self.stack())
            sizes, descriptor = self._connection.recv(), recv_handle(self._connection)
        except (OSError, EOFError) as error:
            raise self._died() from error
        future = self.open.popleft()()
        if future is None:
            os.close(descriptor)
            return
        value, failure = unpack(sizes, descriptor)
        future.set_result(value) if failure is None else future.set_exception(failure)

    def stack(self) -> str:
        """Where the process is, as a sentence."""
        if self._pid is None:
            return f"Reader process {self._number} has ended"
        self.kill(_STACK_SIGNAL)
        deadline_s = time.monotonic() + _STACK_TIMEOUT_S
        text = ""
        while time.monotonic() < deadline_s and not text.endswith("\n"):
            time.sleep(0.02)
            text = os.pread(self._stack_file, 1 << 16, 0).decode(errors="replace")
        if not text:
            return f"Reader process {self._number} (pid {self._pid}) does not respond: it is stopped"
        return f"Reader process {self._number} is at (most recent call first):\n{text.partition(':')[2].strip()}"

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self._pid is not None:
            os.kill(self._pid, number)  # works on a dead process too, until it is waited for

    def close(self) -> None:
        if not self._connection.closed:
            self._connection.close()
            os.close(self._stack_file)
        self._end()

    def _end(self) -> int:
        """Kill the process if it runs; its exit code, negative for a signal."""
        if self._pid is None:
            return 0
        pid, self._pid = self._pid, None
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _died(self) -> ReaderDied:
        code = self._end()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ReaderDied(
            f"reader process {self._number} {how}: if the kernel killed it for its memory, set fewer readers or a "
            "smaller prefetch"
        )


def _fork(run: Callable[[], None]) -> int:
    """Runs a function in a forked child process, which ends with this one; the child's pid.

    Forked, as by torch's DataLoader: data sets need not be picklable, and nothing is imported again. Not through
    multiprocessing.Process, which daemonic workers must not start.
    """
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads do not survive a fork; readers need none
        pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(parent)
        run()
    finally:
        os._exit(0)


def _serve(connection: Connection, read: Callable[[Any], Any], stack_file: int) -> None:
    # The worker handles these signals; it may need its readers to finish a step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # the parent's thread pool does not exist here
    _close_sockets(connection.fileno())
    faulthandler.register(_STACK_SIGNAL, stack_file, all_threads=False)
    with contextlib.suppress(OSError, EOFError):  # the worker has closed the connection
        while True:
            request = connection.recv()
            try:
                sizes, descriptor = pack((read(request), None))
            except BaseException as error:
                sizes, descriptor = pack((None, _with_traceback(error)))
            connection.send(sizes)
            send_handle(connection, descriptor, None)
            os.close(descriptor)


def _close_sockets(kept: int) -> None:
    """Peers detect this worker's death by its closed connections. Copies of the sockets here would delay that."""
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            if number > 2 and number != kept and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)


def _with_traceback(error: BaseException) -> BaseException:
    """The error in a form that can be sent, with its traceback as a note."""
    text = f"in a reader process:\n{''.join(traceback.format_exception(error))}"
    error.add_note(text)
    return picklable(error, text)
