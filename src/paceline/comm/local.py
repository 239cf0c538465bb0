"""Several replicas inside one process, on one device or on several.

Each replica uses one member of a `LocalGroup`. An exchange happens when its last member calls, in the thread of that
member. Replicas may run in threads, or in turns in a single thread: start the call on every member, then wait on all.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.comm.base import DEFAULT_TIMEOUT_S, Pending
from paceline.core.errors import CommunicationError, CommunicationTimeout
from paceline.core.world import World


class LocalGroup:
    """The replicas of one process; `members[i]` is the communicator of replica i."""

    def __init__(self, devices: Sequence[torch.device | str], timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not devices:
            raise ValueError("a group needs at least one device")
        size = len(devices)
        self._changed = threading.Condition()
        self._exchanges: dict[int, _Exchange] = {}  # by call number; those that wait for members
        self._closed: set[int] = set()
        self._sent: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)  # by sender and receiver
        self.members = tuple(
            LocalCommunicator(self, World(i, size, i, size, "local", torch.device(device)), timeout_s)
            for i, device in enumerate(devices)
        )

    def join(self, number: int, rank: int, operation: str, tensor: torch.Tensor, source: int | None) -> _Exchange:
        """Contribute to exchange `number`; the last member to join carries it out."""
        call = f"{operation} on {tuple(tensor.shape)} of {tensor.dtype}"
        with self._changed:
            exchange = self._exchanges.setdefault(number, _Exchange(rank, call, source))
            exchange.tensors[rank] = tensor
            if call != exchange.call:
                exchange.fail(
                    f"exchange {number}: rank {rank} calls {call}, rank {exchange.first} calls {exchange.call}: "
                    "all replicas must make the same calls in the same order"
                )
            elif absent := self._closed - set(exchange.tensors):
                exchange.fail_without(min(absent))
            if len(exchange.tensors) == len(self.members):
                del self._exchanges[number]
                exchange.carry_out()
            self._changed.notify_all()
            return exchange

    def wait(self, exchange: _Exchange, rank: int, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: exchange.is_done, timeout_s):
                missing = sorted(set(range(len(self.members))) - set(exchange.tensors))
                limit = f"timeout_s={timeout_s:g} s"
                raise CommunicationTimeout(
                    f"rank {rank} waited {limit} in {exchange.call}: replicas {missing} did not call it"
                )
        if exchange.error is not None:
            raise CommunicationError(exchange.error)

    def send(self, source: int, to: int, tensor: torch.Tensor) -> None:
        with self._changed:
            self._sent[source, to].append(tensor.clone())
            self._changed.notify_all()

    def receive(self, source: int, to: int, timeout_s: float) -> torch.Tensor:
        with self._changed:
            sent = self._sent[source, to]
            if not self._changed.wait_for(lambda: sent or source in self._closed, timeout_s):
                raise CommunicationTimeout(
                    f"rank {to} waited timeout_s={timeout_s:g} s in receive: replica {source} did not send"
                )
            if not sent:
                raise CommunicationError(f"replica {source} closed its communicator before it sent to rank {to}")
            return sent.popleft()

    def leave(self, rank: int) -> None:
        """Rank makes no more calls: exchanges that need one fail."""
        with self._changed:
            self._closed.add(rank)
            for exchange in self._exchanges.values():
                if rank not in exchange.tensors:
                    exchange.fail_without(rank)
            self._changed.notify_all()


class LocalCommunicator:
    """The communicator of one replica. It is also a `Link`."""

    is_trusted = True  # nothing leaves the process

    def __init__(self, group: LocalGroup, world: World, timeout_s: float) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self._group = group
        self._num_calls = 0

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._join("all_reduce", tensor, None)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        if not 0 <= source < self.world.size:
            raise ValueError(f"source={source} is not a rank in a world of {self.world.size}")
        return self._join(f"broadcast from {source}", tensor, source)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._group.send(self.world.rank, to, tensor)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self._group.receive(source, self.world.rank, self.timeout_s))

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        self._group.leave(self.world.rank)

    abort = close

    def _join(self, operation: str, tensor: torch.Tensor, source: int | None) -> Pending:
        number, self._num_calls = self._num_calls, self._num_calls + 1
        exchange = self._group.join(number, self.world.rank, operation, tensor, source)
        return _PendingExchange(exchange, self._group, self.world.rank, self.timeout_s)


@dataclass
class _Exchange:
    """`first` is the rank that called first; all others must make the same `call`."""

    first: int
    call: str
    source: int | None
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    is_done: bool = False
    error: str | None = None

    def fail(self, error: str) -> None:
        self.error = self.error or error
        self.is_done = True

    def fail_without(self, rank: int) -> None:
        self.fail(f"replica {rank} closed its communicator before {self.call}, which rank {self.first} waits for")

    @torch.no_grad()
    def carry_out(self) -> None:
        try:
            if self.error is None:
                # In rank order: the result must not depend on the timing of threads.
                tensors = [self.tensors[rank] for rank in sorted(self.tensors)]
                for other in tensors[1:] if self.source is None else ():
                    tensors[0].add_(other.to(tensors[0].device))
                result = tensors[self.source or 0]
                for tensor in tensors:
                    if tensor is not result:
                        tensor.copy_(result)
        except RuntimeError as error:
            self.fail(f"{self.call} failed: {error}")
        self.is_done = True


@dataclass(frozen=True)
class _PendingExchange:
    exchange: _Exchange
    group: LocalGroup
    rank: int
    timeout_s: float

    def wait(self) -> None:
        self.group.wait(self.exchange, self.rank, self.timeout_s)
