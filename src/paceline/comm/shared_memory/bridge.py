"""Exchanges between hosts: a thread of each host's leader, its first worker, runs them while all workers compute.

When all workers of the host have made a call, the thread sums their buffers into the leader's, starts an all-reduce
over Gloo among the leaders, and copies the result to all workers of the host. Large buffers travel in pieces, so that
sums, network and copies overlap.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from paceline.comm.base import Pending
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.shared_memory.buffers import BridgedBuffer, Piece
from paceline.comm.shared_memory.peers import LocalPeers
from paceline.comm.shared_memory.segment import Segment
from paceline.core.errors import CommunicationError, CommunicationTimeout, PacelineError
from paceline.core.world import World

# How often an idle leader checks that the workers of its host are alive: other hosts may wait for them.
IDLE_CHECK_S = 0.25


class _Call(NamedTuple):
    number: int
    buffer: BridgedBuffer
    text: str
    source: int | None


class _Sent(NamedTuple):
    """A piece on the network."""

    call: _Call
    piece: Piece
    pending: Pending
    is_last: bool


class _Stopped(Exception):
    """The leader has stopped the thread."""


class Bridge:
    """The leader's thread and process group. The leaders of all hosts construct it together.

    An error ends the thread. It is reported in the leader's segment, where all workers of the host find it, and closes
    the connections to the other leaders.
    """

    def __init__(self, peers: LocalPeers, hosts: Sequence[range], rendezvous: Rendezvous) -> None:
        self._peers = peers
        self._hosts = hosts
        host = hosts.index(peers.ranks)
        leaders = World(host, len(hosts), 0, 1, peers.world.host, peers.world.device)
        self._group = ProcessGroupCommunicator(leaders, "gloo", peers.timeout_s, rendezvous)
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._next: _Call | None = None
        self._sent: deque[_Sent] = deque()
        self._is_stopped = False
        self._lock = threading.Lock()  # of _is_stopped and _sent: nothing is sent after a stop
        self._thread = threading.Thread(target=self._run, name="paceline bridge", daemon=True)
        self._thread.start()

    def submit(self, number: int, buffer: BridgedBuffer, text: str, source: int | None) -> None:
        self._calls.put(_Call(number, buffer, text, source))

    def stop(self) -> None:
        """Fail the exchange in progress on all hosts."""
        with self._lock:
            self._is_stopped = True
        self._calls.put(None)
        self._group.abort()

    def close(self) -> None:
        with self._lock:
            is_busy, self._is_stopped = bool(self._sent), True
        self._calls.put(None)
        if is_busy:
            self._group.abort()
        self._thread.join()
        self._group.close()

    def _run(self) -> None:
        try:
            while True:
                self._take_next()
                if self._next is not None and (not self._sent or self._is_called(self._next.number)):
                    call, self._next = self._next, None
                    self._send(call)
                else:
                    self._deliver()
        except _Stopped:
            return
        except Exception as error:
            if not self._is_stopped:
                self._peers.fail(error if isinstance(error, PacelineError) else CommunicationError(repr(error)))
                self._group.abort()

    def _take_next(self) -> None:
        """Set `_next` to the next call. Waits for one only if nothing is on the network."""
        while self._next is None:
            try:
                self._next = self._calls.get(block=not self._sent, timeout=IDLE_CHECK_S)
            except Empty:
                if self._sent:
                    return
                if loss := self._peers.lost_before(self._peers.own.num_calls):
                    raise CommunicationError(loss) from None
            else:
                if self._next is None:
                    raise _Stopped

    def _is_called(self, number: int) -> bool:
        return all(segment.num_calls > number for segment in self._peers.segments)

    def _send(self, call: _Call) -> None:
        def has_called(peer: Segment) -> bool:
            if self._is_stopped:
                raise _Stopped
            return peer.num_calls > call.number

        self._peers.wait_for_calls(call.number, call.text, has_called)
        pieces = call.buffer.pieces
        for piece in pieces:
            if call.source is None:
                piece.reduce()
            elif call.source in self._peers.ranks:
                piece.take(self._peers.ranks.index(call.source))
            with self._lock:
                if self._is_stopped:
                    raise _Stopped
                self._sent.append(_Sent(call, piece, self._exchange(piece, call.source), piece is pieces[-1]))

    def _exchange(self, piece: Piece, source: int | None) -> Pending:
        if source is None:
            return self._group.all_reduce(piece.tensor)
        return self._group.broadcast(piece.tensor, next(i for i, ranks in enumerate(self._hosts) if source in ranks))

    def _deliver(self) -> None:
        """Wait for the oldest piece on the network and hand it to the workers of this host."""
        call, piece, pending, is_last = self._sent[0]
        rank = self._peers.world.rank
        try:
            pending.wait()
        except CommunicationTimeout:
            others = [other for ranks in self._hosts if ranks != self._peers.ranks for other in ranks]
            raise CommunicationTimeout(
                f"rank {rank} waited timeout_s={self._peers.timeout_s:g} s in {call.text}: all workers of this host "
                f"called it, but not all of ranks {others} on other hosts did"
            ) from None
        except CommunicationError as error:
            raise CommunicationError(f"rank {rank} lost contact with the other hosts in {call.text}: {error}") from None
        piece.distribute()
        with self._lock:
            self._sent.popleft()
        if is_last:
            self._peers.own.complete()
