"""Workers on one host, CPU tensors: sums are taken in memory that all of them map.

A small buffer is copied to where the peers can read it, and each worker adds all copies up by itself: they meet once.
A large one is cut into blocks, and whoever waits takes blocks: it adds all workers' up in rank order and writes the
sum into all workers' buffers, so that every byte is read once and written once. They meet twice, before and after. A
worker that has started the exchange but is busy elsewhere holds up nobody, and one that is slowed down leaves the
rest of its blocks to the others; who adds does not change the sum.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from time import monotonic, perf_counter

import torch

from paceline.comm.base import Combination, Communicator, Pending
from paceline.comm.long_turns import LongTurns
from paceline.comm.shared_memory.arena import (
    Arena,
    Board,
    Claims,
    OwnArena,
    Processes,
    State,
    missing_arena,
    record_text,
)
from paceline.core.errors import CommunicationError, CommunicationTimeout, MisuseError
from paceline.core.world import World

# Up to here a second meeting would cost more than adding everything up on every worker.
SMALL_BYTES = 32 << 10
# The blocks of all workers stay in a core's cache between reading and writing.
BLOCK_BYTES = 256 << 10
ALIGNMENT_BYTES = 64
# How long to look again and again before sleeping: several times what falling asleep and being woken costs, which in a
# virtual machine can be 100 us and more.
SPIN_S = 500e-6
# A sleeping worker looks so often whether its peers still live.
NAP_S = 0.03


def missing_shared_memory(world: World) -> str | None:
    """Why the workers of this world cannot exchange through shared memory; None if they can."""
    if world.size == 1:
        return "a worker alone has nobody to share memory with"
    if world.local_size != world.size:
        return f"{world.size - world.local_size} of the {world.size} workers are on other hosts"
    if world.device.type != "cpu":
        return f"this worker's tensors are on {world.device}, not on the CPU"
    return missing_arena()


class SharingCommunicator(ABC):
    """Exchanges tensors made by `empty` in a way that starts from shared memory, and all others through `outer`.

    `outer` is closed with this communicator. The memory of `empty` is given back when the communicator is closed and
    the last tensor over it is gone.
    """

    def __init__(self, outer: Communicator, workers: Workers) -> None:
        self._outer = outer
        self._workers = workers
        self._buffers: dict[tuple[int, int, torch.dtype], Buffer] = {}

    @property
    def world(self) -> World:
        return self._outer.world

    @property
    def timeout_s(self) -> float:
        return self._outer.timeout_s

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        buffer = self._find(tensor)
        return self._outside(tensor, "all_reduce", None) if buffer is None else self._start(buffer, "all_reduce")

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        if not 0 <= source < self.world.size:
            raise ValueError(f"source={source} is not a rank in a world of {self.world.size}")
        buffer, call = self._find(tensor), f"broadcast from {source}"
        return self._outside(tensor, call, source) if buffer is None else self._start(buffer, call, source)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._workers.check_usable()
        if device.type != "cpu" or numel == 0:
            return self._outer.empty(numel, dtype, device)
        try:
            buffer = self._make_buffer(numel, dtype)
        except OSError as error:
            raise CommunicationError(f"there is no shared memory for {numel:,} numbers of {dtype}: {error}") from None
        self._buffers[_identity(buffer.tensor)] = buffer
        return buffer.tensor

    def close(self) -> None:
        self._buffers.clear()
        self._workers.close()
        self._outer.close()

    def _outside(self, tensor: torch.Tensor, operation: str, source: int | None) -> Pending:
        """An exchange of a tensor that `empty` did not make."""
        self._workers.own.board.announce_call()
        return self._outer.all_reduce(tensor) if source is None else self._outer.broadcast(tensor, source)

    @abstractmethod
    def _make_buffer(self, numel: int, dtype: torch.dtype) -> Buffer: ...

    @abstractmethod
    def _start(self, buffer: Buffer, operation: str, source: int | None = None) -> Pending:
        """A sum, or a broadcast of what the source has."""

    def _find(self, tensor: torch.Tensor) -> Buffer | None:
        """The buffer that this tensor is the whole of."""
        self._workers.check_usable()
        return self._buffers.get(_identity(tensor)) if tensor.is_contiguous() else None


class SharedMemoryCommunicator(SharingCommunicator):
    """The workers of one host.

    All workers construct it together, and make the same calls of `empty` too. If one of them cannot share memory the
    constructor raises on all, and `outer` serves on.
    """

    def __init__(self, outer: Communicator) -> None:
        super().__init__(outer, Workers(outer, range(outer.world.size), missing_shared_memory(outer.world)))
        self._turns: LongTurns | None = None

    def close(self) -> None:
        super().close()
        if self._turns is not None:
            self._turns.close()

    def _make_buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        kind = _SmallBuffer if numel * dtype.itemsize <= SMALL_BYTES else _LargeBuffer
        return kind(self._workers.own, self._workers.arenas, numel, dtype)

    def _start(self, buffer: Buffer, operation: str, source: int | None = None) -> Pending:
        # Only now: what helps a worker has been started by its first exchange.
        if self._turns is None and self._workers.share_cores:
            self._turns = LongTurns()
        return Exchange(self._workers, buffer, operation, source)


class Workers:
    """The workers around their shared memory, as one of them sees them.

    `ranks`: those with which this one shares memory, and itself. `obstacle`: why it cannot. All workers of the world
    construct it, those with other ranks too, and all raise if one cannot.
    """

    def __init__(self, outer: Communicator, ranks: Sequence[int], obstacle: str | None) -> None:
        self._outer = outer
        self.own, self.arenas, self._processes = _share_memory(outer, ranks, obstacle)
        self._peers = {r: arena.board for r, arena in zip(ranks, self.arenas, strict=True) if arena is not self.own}
        self._failure: str | None = None
        # Where workers share cores, whoever spins is in the way of the one it waits for.
        self.share_cores = len(os.sched_getaffinity(0)) < len(ranks)
        self._spin_s = self._max_spin_s = 0.0 if self.share_cores else SPIN_S

    def check_usable(self) -> None:
        if not self.arenas:
            raise MisuseError("the communicator is closed: nothing can be exchanged any more")
        if self._failure is not None:
            raise CommunicationError(f"nothing can be exchanged after this error: {self._failure}")

    def wait(self, is_ready: Callable[[Board], bool], call: str, omission: str) -> None:
        """Until every peer's board is ready. `omission`: what those whose board is not have left undone."""
        deadline = monotonic() + self._outer.timeout_s
        for board in self._peers.values():
            if is_ready(board):
                continue
            started = perf_counter()
            while not is_ready(board):
                if perf_counter() - started > self._spin_s:
                    self._sleep_until_ready(board, is_ready, call, omission, deadline)
            # Spinning is worth its time only where waits are short: not beside other programs, nor under a quota.
            was_short = perf_counter() - started < self._max_spin_s
            self._spin_s = min(2 * self._spin_s + 1e-6, self._max_spin_s) if was_short else self._spin_s / 2

    def _sleep_until_ready(
        self, board: Board, is_ready: Callable[[Board], bool], call: str, omission: str, deadline: float
    ) -> None:
        while True:
            # Read before looking: what a peer did before it left counts, and a bell rung since then lets nobody sleep.
            bell, losses = board.bell.value, self._losses()
            missing = [rank for rank, peer in self._peers.items() if not is_ready(peer)]
            if is_ready(board):
                return
            rank, timeout_s = self._outer.world.rank, self._outer.timeout_s
            if lost := [peer for peer in missing if peer in losses]:
                raise CommunicationError(f"rank {lost[0]} {losses[lost[0]]} before {call}, which rank {rank} waits for")
            if monotonic() > deadline:
                raise CommunicationTimeout(
                    f"rank {rank} waited timeout_s={timeout_s:g} s in {call}: ranks {missing} {omission}"
                )
            board.bell.sleep(bell, NAP_S)

    def _losses(self) -> dict[int, str]:
        """The ranks from which nothing more will come, and why."""
        losses = dict.fromkeys(self._processes.ended(), "died")
        for rank, board in self._peers.items():
            if board.state == State.CLOSED:
                losses[rank] = "closed its communicator"
            elif board.state != State.OPEN:
                losses[rank] = "stopped after an error"
        return losses

    def check_same_call(self, number: int, place: tuple[int, int], call: str) -> None:
        """All have made call `number`: was it the same?"""
        own = self.own.board.record(place)
        for rank, board in self._peers.items():
            if board.record(place) != own:
                theirs = board.find_call(number) or "an exchange outside shared memory"
                raise CommunicationError(
                    f"exchange {number}: rank {self._outer.world.rank} calls {call}, rank {rank} {theirs}: "
                    "every worker must make the same calls in the same order"
                )

    def fail(self, error: BaseException) -> None:
        """Go no further, and tell the peers: after an error in an exchange, nobody knows what is in the buffers."""
        self._failure = str(error) or type(error).__name__
        self.own.board.end(ending(error), self._failure)

    def close(self) -> None:
        if self.arenas:
            self.own.board.end(State.CLOSED)
            self.own.close()
            self._processes.close()
            # Unmapped, as far as no tensor is left over them.
            self.arenas, self._peers = [], {}
            del self.own


def ending(error: BaseException) -> State:
    """How a worker ends with this error."""
    return State.TIMED_OUT if isinstance(error, CommunicationTimeout) else State.FAILED


class Buffer(ABC):
    """What `empty` made: one part on each worker, at the same place in each one's memory.

    Whatever the peers may still read of an exchange when the next one of the same buffer starts exists twice, and is
    used in turn. That is enough: when a worker starts the next but one, it has seen all peers start the next, and so
    end this one.
    """

    # Whether the workers divide the work, so that each must wait until the others have done theirs.
    is_divided: bool

    def __init__(self, own: OwnArena, arenas: Sequence[Arena], numel: int, dtype: torch.dtype, more_bytes: int) -> None:
        nbytes = _aligned(numel * dtype.itemsize)
        offset = own.reserve(nbytes + more_bytes)
        self._number = own.board.add_buffer()
        self._turn = 0
        self._parts = [arena.tensor(numel, dtype, offset) for arena in arenas]
        self._more_offset = offset + nbytes
        self._rank = arenas.index(own)
        self.tensor = self._parts[self._rank]
        self.name = f"{numel} numbers of {dtype} (buffer {self._number} at {offset})"
        self.is_in_flight = False
        self._descriptions: dict[str, tuple[str, bytes]] = {}

    def describe(self, operation: str) -> tuple[str, bytes]:
        """A call on it, for errors and for the board."""
        if operation not in self._descriptions:
            call = f"{operation} of {self.name}"
            self._descriptions[operation] = call, record_text(call)
        return self._descriptions[operation]

    @property
    def place(self) -> tuple[int, int]:
        """Where the record of a call on it is."""
        return self._number, self._turn

    def start(self) -> None:
        self.is_in_flight = True

    @abstractmethod
    def combine(self, combination: Combination, source: int | None) -> None:
        """When all have started: give this worker, or all, the combination or the source's part."""

    def end(self) -> None:
        self.is_in_flight = False
        self._turn = 1 - self._turn


class _SmallBuffer(Buffer):
    """Every worker adds up copies of all parts by itself."""

    is_divided = False

    def __init__(self, own: OwnArena, arenas: Sequence[Arena], numel: int, dtype: torch.dtype) -> None:
        nbytes = _aligned(numel * dtype.itemsize)
        super().__init__(own, arenas, numel, dtype, 2 * nbytes)
        offsets = (self._more_offset, self._more_offset + nbytes)
        self._copies = [[arena.tensor(numel, dtype, offset) for arena in arenas] for offset in offsets]

    def start(self) -> None:
        super().start()
        self._copies[self._turn][self._rank].copy_(self.tensor)

    def combine(self, combination: Combination, source: int | None) -> None:
        copies = self._copies[self._turn]
        if source is None:
            combination(copies, self.tensor)
        else:
            self.tensor.copy_(copies[source])


class _LargeBuffer(Buffer):
    """Blocks that the workers take one by one, writing the result into all parts."""

    is_divided = True

    def __init__(self, own: OwnArena, arenas: Sequence[Arena], numel: int, dtype: torch.dtype) -> None:
        size = len(arenas)
        block = min(BLOCK_BYTES, _aligned(-(-numel * dtype.itemsize // size))) // dtype.itemsize
        count = -(-numel // block)
        super().__init__(own, arenas, numel, dtype, Claims.num_bytes(count))
        self._blocks = list(zip(*(part.split(block) for part in self._parts), strict=True))
        self._claims = Claims(arenas[0], self._more_offset, count)
        if self._rank == 0:
            self._claims.prepare()
        # Each begins at another place, so that they rarely ask for the same block.
        first = self._rank * count // size
        self._order = [*range(first, count), *range(first)]

    def combine(self, combination: Combination, source: int | None) -> None:
        for index in self._order:
            if self._claims.take(self._turn, index):
                _combine_in_place(self._blocks[index], combination, source)


class Exchange:
    """A call on a shared buffer. What is to be done after all have called is done in `wait`."""

    def __init__(self, workers: Workers, buffer: Buffer, operation: str, source: int | None = None) -> None:
        self._call, text = buffer.describe(operation)
        if buffer.is_in_flight:
            raise MisuseError(f"{self._call} is called while it is in another exchange: wait() for that one first")
        self._workers = workers
        self._buffer = buffer
        self._source = source
        self._is_done = False
        buffer.start()
        self._number = workers.own.board.announce_call(buffer.place, text)

    def wait(self) -> None:
        if self._is_done:
            return
        self._workers.check_usable()
        try:
            self._complete()
        except BaseException as error:
            self._workers.fail(error)
            raise
        self._is_done = True
        self._buffer.end()

    def _complete(self) -> None:
        workers, buffer, number = self._workers, self._buffer, self._number
        workers.wait(lambda board: board.calls > number, self._call, "did not call it")
        workers.check_same_call(number, buffer.place, self._call)
        if not buffer.is_divided:
            buffer.combine(_add_up, self._source)
            return
        workers.own.board.enter(number)
        buffer.combine(_add_up, self._source)
        workers.own.board.leave()
        workers.wait(lambda board: board.inside != number, self._call, "did not finish their blocks")


def _add_up(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """In rank order: the sum's bits must not depend on who computes it. `out` may be the first part."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def _combine_in_place(parts: Sequence[torch.Tensor], combination: Combination, source: int | None) -> None:
    """Write the combination, or the source's part, into all parts."""
    if source is None:
        source = 0
        combination(parts, parts[source])
    for rank, part in enumerate(parts):
        if rank != source:
            part.copy_(parts[source])


def _identity(tensor: torch.Tensor) -> tuple[int, int, torch.dtype]:
    return tensor.data_ptr(), tensor.nbytes, tensor.dtype


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _share_memory(
    outer: Communicator, ranks: Sequence[int], obstacle: str | None
) -> tuple[OwnArena, list[Arena], Processes]:
    """This worker's arena, those of all ranks in their order, and an eye on their processes."""
    world = outer.world
    with ExitStack() as undo:
        with agreed(outer):
            if obstacle is not None:
                raise OSError(obstacle)
            own = undo.enter_context(closing(OwnArena()))
        offers = torch.zeros(world.size, 3, dtype=torch.int64)
        offers[world.rank] = torch.tensor([os.getpid(), own.fd, own.token])
        outer.all_reduce(offers).wait()
        with agreed(outer):
            offered = {rank: offers[rank].tolist() for rank in ranks}
            processes = undo.enter_context(closing(Processes({rank: pid for rank, (pid, _, _) in offered.items()})))
            peers = {rank: Arena.of_peer(*offer) for rank, offer in offered.items() if rank != world.rank}
        undo.pop_all()
    return own, [peers.get(rank, own) for rank in ranks], processes


@contextmanager
def agreed(outer: Communicator, aim: str = "share memory") -> Iterator[None]:
    """What goes wrong inside on one worker is an error on all."""
    problem: str | None = None
    try:
        yield
    except (OSError, CommunicationError) as error:
        problem = str(error)
    failed = torch.zeros(outer.world.size, dtype=torch.int64)
    failed[outer.world.rank] = problem is not None
    outer.all_reduce(failed).wait()
    if problem is not None:
        raise CommunicationError(f"rank {outer.world.rank} cannot {aim}: {problem}")
    if failed.any():
        ranks = failed.nonzero().flatten().tolist()
        raise CommunicationError(f"ranks {ranks} cannot {aim}: their own errors say why")
