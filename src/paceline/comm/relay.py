"""Between a host and the others: two threads of its leader, which carry exchanges on while all workers compute.

One waits until all workers of the host have called, adds their buffers up, in rank order, into the leader's, and
starts Gloo among the leaders; the other waits for Gloo and copies what comes out into the buffers of the host. Large
buffers go in pieces, so that adding, the network and copying run at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.comm.base import Pending
from paceline.comm.shared_memory.arena import Board
from paceline.comm.shared_memory.communicator import ending
from paceline.core.errors import CommunicationError, CommunicationTimeout, PacelineError

if TYPE_CHECKING:
    from paceline.comm.hosts import HostBuffer, HostWorkers

# Torch works on no more numbers than these with one thread: others would be in the way of the worker's own.
BLOCK_NUMEL = 32704
# How often a leader without work looks whether the workers of its host still live: others may wait for them.
WATCH_S = 0.25


class Across(Protocol):
    """The leaders' communicator. `abort` makes an error of what is under way, and is called from any thread."""

    def all_reduce(self, tensor: torch.Tensor) -> Pending: ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Piece:
    """The same part of a buffer on all workers of a host, the leader's first."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.of_leader = parts[0]
        self._blocks = list(zip(*(part.split(BLOCK_NUMEL) for part in parts), strict=True))

    def add_up(self) -> None:
        """In rank order, into the leader's."""
        for first, *others in self._blocks:
            for other in others:
                first.add_(other)

    def take(self, index: int) -> None:
        if index:
            for block in self._blocks:
                block[0].copy_(block[index])

    def spread(self) -> None:
        for first, *others in self._blocks:
            for other in others:
                other.copy_(first)


@dataclass(frozen=True)
class Task:
    """An exchange that the leader has started."""

    number: int
    buffer: HostBuffer
    call: str
    source: int | None


@dataclass(frozen=True)
class _Travelling:
    """A piece that is on the network."""

    task: Task
    piece: Piece
    pending: Pending
    is_last: bool


class _Stopped(Exception):
    """There is no result to be had any more: the leader's own thread said so."""


class Relay:
    """The leader's threads. The first error ends both; the host's workers find it on the leader's board."""

    def __init__(self, workers: HostWorkers, across: Across) -> None:
        self.error: PacelineError | None = None
        self._workers = workers
        self._across = across
        self._is_stopped = False
        self._num_sent = self._num_delivered = 0
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._travelling: SimpleQueue[_Travelling | None] = SimpleQueue()
        self._collector = self._start_thread(self._collect, "collector")
        self._deliverer = self._start_thread(self._deliver, "deliverer")

    def take(self, task: Task) -> None:
        self._tasks.put(task)

    def stop(self) -> None:
        """Give up what is under way, and tell the other hosts."""
        self._is_stopped = True
        self._across.abort()
        self._tasks.put(None)
        self._travelling.put(None)

    def close(self) -> None:
        self._is_stopped = True
        self._tasks.put(None)
        self._collector.join()
        if not self._is_idle:
            self._across.abort()
        self._travelling.put(None)
        self._deliverer.join()

    @property
    def _is_idle(self) -> bool:
        return self._num_sent == self._num_delivered

    def _start_thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=self._guard, args=(run,), name=f"paceline {name}", daemon=True)
        thread.start()
        return thread

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except _Stopped:
            return
        except Exception as error:
            if not self._is_stopped:
                self._fail(error if isinstance(error, PacelineError) else CommunicationError(repr(error)))

    def _fail(self, error: PacelineError) -> None:
        self.error = error
        self._workers.own.board.end(ending(error), str(error))
        self.stop()

    def _collect(self) -> None:
        while (task := self._next_task()) is not None:
            self._workers.wait(partial(self._has_called, task.number), task.call, "did not call it")
            self._workers.check_same_call(task.number, task.buffer.place, task.call)
            for piece in task.buffer.pieces:
                self._num_sent += 1
                pending = self._send(piece, task.source)
                self._travelling.put(_Travelling(task, piece, pending, piece is task.buffer.pieces[-1]))

    def _next_task(self) -> Task | None:
        while True:
            try:
                return self._tasks.get(timeout=WATCH_S)
            except Empty:
                if self._is_idle and self._workers.have_left():
                    self._across.abort()  # other hosts may wait for us, in vain

    def _has_called(self, number: int, board: Board) -> bool:
        if self._is_stopped:
            raise _Stopped
        return board.calls > number

    def _send(self, piece: Piece, source: int | None) -> Pending:
        if self._is_stopped:
            raise _Stopped
        if source is None:
            piece.add_up()
            return self._across.all_reduce(piece.of_leader)
        workers = self._workers
        if source in workers.ranks:
            piece.take(workers.ranks.index(source))
        [host] = [index for index, ranks in enumerate(workers.hosts) if source in ranks]
        return self._across.broadcast(piece.of_leader, host)

    def _deliver(self) -> None:
        while (travelling := self._travelling.get()) is not None:
            try:
                travelling.pending.wait()
            except CommunicationTimeout:
                raise self._workers.time_out_across(travelling.task.call) from None
            travelling.piece.spread()
            self._num_delivered += 1
            if travelling.is_last:
                travelling.task.buffer.finished.add_one()
