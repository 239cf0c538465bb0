"""CPU workers on several hosts: sums are taken inside each host first, through shared memory, then across.

One worker of each host, its first, is the leader: it adds up, talks to the leaders of the other hosts and hands the
result out, in threads of its own (see `relay`). The workers themselves only call and wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic

import torch

from paceline.comm.base import Combination, Communicator, Pending
from paceline.comm.relay import Across, Piece, Relay, Task
from paceline.comm.shared_memory.arena import Count, State, missing_arena
from paceline.comm.shared_memory.communicator import NAP_S, Buffer, Exchange, SharingCommunicator, Workers, agreed
from paceline.core.errors import CommunicationError, CommunicationTimeout, PacelineError

# What is handed to the network at once, for each host: around a ring of them go messages of this size.
PIECE_BYTES = 1 << 20
# A leader's own time-out comes before that of those who wait for it, and says more.
GRACE_S = 2.0


class HostsCommunicator(SharingCommunicator):
    """Exchanges tensors made by `empty` inside the hosts and then across, and all others through `flat`.

    All workers construct it together. If it cannot be had on one of them the constructor raises on all, and `flat`
    serves on; else `flat` is closed with this communicator. `join_leaders` makes the communicator of these ranks; all
    workers call it, and only those use it.
    """

    def __init__(
        self, flat: Communicator, hosts: Sequence[range], join_leaders: Callable[[Sequence[int]], Across]
    ) -> None:
        workers = HostWorkers(flat, hosts)
        try:
            with agreed(flat, "join the leaders of the hosts"):
                workers.join(join_leaders)
        except BaseException:
            workers.close()
            raise
        super().__init__(flat, workers)
        self._host_workers = workers

    def _make_buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        return HostBuffer(self._host_workers, numel, dtype)

    def _start(self, buffer: Buffer, operation: str, source: int | None = None) -> Pending:
        number = self._workers.own.board.calls
        exchange = Exchange(self._workers, buffer, operation, source)
        if (relay := self._host_workers.relay) is not None:
            assert isinstance(buffer, HostBuffer)
            relay.take(Task(number, buffer, buffer.call, source))
        return exchange


class HostWorkers(Workers):
    """The workers of one host, whose leader goes between them and the other hosts."""

    def __init__(self, flat: Communicator, hosts: Sequence[range]) -> None:
        self.world = flat.world
        self.hosts = hosts
        [self.ranks] = [ranks for ranks in hosts if self.world.rank in ranks]
        self.relay: Relay | None = None
        self._across: Across | None = None
        self._poll_lock = threading.Lock()
        super().__init__(flat, self.ranks, missing_arena())
        # The network takes far longer than falling asleep, and its threads need the core.
        self._max_spin_s = self._spin_s = 0.0

    def join(self, join_leaders: Callable[[Sequence[int]], Across]) -> None:
        self._across = join_leaders([ranks[0] for ranks in self.hosts])
        if self.world.rank == self.ranks[0]:
            self.relay = Relay(self, self._across)

    @property
    def elsewhere(self) -> list[int]:
        """The ranks on other hosts."""
        return [rank for rank in range(self.world.size) if rank not in self.ranks]

    def check_usable(self) -> None:
        super().check_usable()
        if self.relay is not None and self.relay.error is not None:
            self.fail(self.relay.error)
            raise _again(self.relay.error)

    def have_left(self) -> bool:
        """Whether a worker of this host makes no more calls, while the leader has not made more than it."""
        return any(self._peers[rank].calls <= self.own.board.calls for rank in self._losses() if rank in self._peers)

    def wait_for_result(self, finished: Count, target: int, call: str) -> None:
        """Until the leader has raised the count to `target`."""
        deadline = monotonic() + self._outer.timeout_s + GRACE_S
        while (value := finished.value) != target:
            # Looked at before the count is read again: what the leader did before it left counts.
            problem = self._problem_of_leader(call)
            if finished.value == target:
                return
            if problem is not None:
                raise problem
            if monotonic() > deadline:
                raise CommunicationTimeout(
                    f"rank {self.world.rank} waited timeout_s={self._outer.timeout_s:g} s in {call}: rank "
                    f"{self.ranks[0]}, which goes between this host and the others, does not answer"
                )
            finished.sleep(value, NAP_S)

    def time_out_across(self, call: str) -> CommunicationTimeout:
        return CommunicationTimeout(
            f"rank {self.world.rank} waited timeout_s={self._outer.timeout_s:g} s in {call}: this host's workers all "
            f"called it, but of those on other hosts, ranks {self.elsewhere}, not all did"
        )

    def _problem_of_leader(self, call: str) -> PacelineError | None:
        if self.relay is not None:
            return None if self.relay.error is None else _again(self.relay.error)
        rank = self.ranks[0]
        loss = self._losses().get(rank)
        if loss is None:
            return None
        board = self._peers[rank]
        if board.state == State.TIMED_OUT:
            return CommunicationTimeout(board.reason)
        reason = f": {board.reason}" if board.reason else ""
        return CommunicationError(f"rank {rank} {loss} before the end of {call}, which needs it{reason}")

    def _losses(self) -> dict[int, str]:
        with self._poll_lock:  # the leader's threads look too
            return super()._losses()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        if self.relay is not None:
            self.relay.stop()

    def close(self) -> None:
        if self.relay is not None:
            self.relay.close()
            self.relay = None
        if self._across is not None:
            self._across.close()
            self._across = None
        super().close()


class HostBuffer(Buffer):
    """What `empty` made, on the workers of a host.

    Nothing of it exists twice: a worker leaves its part alone from its call until the result is in it, and the leader
    touches the parts only between the last call and that.
    """

    is_divided = False

    def __init__(self, workers: HostWorkers, numel: int, dtype: torch.dtype) -> None:
        super().__init__(workers.own, workers.arenas, numel, dtype, Count.NUM_BYTES)
        self._workers = workers
        self.finished = workers.arenas[0].count(self._more_offset)
        self._num_ended = 0
        self.call = ""
        piece = len(workers.hosts) * PIECE_BYTES // dtype.itemsize
        parts_of_pieces = zip(*(part.split(piece) for part in self._parts), strict=True)
        self.pieces = [Piece(parts) for parts in parts_of_pieces] if workers.relay is not None else []

    def describe(self, operation: str) -> tuple[str, bytes]:
        described = super().describe(operation)
        self.call = described[0]
        return described

    def combine(self, combination: Combination, source: int | None) -> None:
        """By the leader: what is left to do is to wait."""
        self._num_ended = (self._num_ended + 1) % 2**32
        self._workers.wait_for_result(self.finished, self._num_ended, self.call)


def _again(error: PacelineError) -> PacelineError:
    """The same error, to be raised in another thread."""
    return type(error)(str(error))
