"""A communicator for workers that are threads, or turns of one thread, of the test's own process."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from paceline.comm.base import OwnedBuffer, Ownership, Pending
from paceline.comm.owned_tensors import owned_tensors
from paceline.core.errors import CommunicationError, CommunicationTimeout
from paceline.core.world import World


def thread_workers(size: int, timeout_s: float = 20.0) -> list[ThreadCommunicator]:
    """The communicators of a world of `size` CPU workers, by rank."""
    shared = _Shared()
    return [ThreadCommunicator(World(i, size, i, size), timeout_s, shared) for i in range(size)]


class _Shared:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.calls: defaultdict[int, dict[int, torch.Tensor]] = defaultdict(dict)  # tensors by call number and rank
        self.sent: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)  # by sender and receiver
        self.closed: set[int] = set()


class ThreadCommunicator:
    """A `Communicator` and a `Link`. The last worker to call carries the exchange out; sums are in rank order."""

    is_trusted = True

    def __init__(self, world: World, timeout_s: float, shared: _Shared) -> None:
        self.world, self.timeout_s = world, timeout_s
        self._shared = shared
        self._num_calls = 0

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._exchange(tensor, lambda tensors: sum(tensors[1:], start=tensors[0].clone()))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        return self._exchange(tensor, lambda tensors: tensors[source].clone())

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def owned(self, ownership: Ownership) -> list[OwnedBuffer]:
        return owned_tensors(self, ownership, lambda tensor, _: self.all_reduce(tensor))

    def send(self, tensor: torch.Tensor, to: int) -> None:
        with self._shared.changed:
            self._shared.sent[self.world.rank, to].append(tensor.clone())
            self._shared.changed.notify_all()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        sent = self._shared.sent[source, self.world.rank]
        with self._shared.changed:
            self._wait(lambda: bool(sent), {source})
            tensor.copy_(sent.popleft())

    def close(self) -> None:
        with self._shared.changed:
            self._shared.closed.add(self.world.rank)
            self._shared.changed.notify_all()

    abort = close

    @torch.no_grad()
    def _exchange(
        self, tensor: torch.Tensor, combine: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> ThreadCommunicator._Pending:
        with self._shared.changed:
            tensors = self._shared.calls[self._num_calls]
            self._num_calls += 1
            tensors[self.world.rank] = tensor
            if len(tensors) == self.world.size:
                result = combine([tensors[rank] for rank in range(self.world.size)])
                for each in tensors.values():
                    each.copy_(result)
                self._shared.changed.notify_all()
        return self._Pending(self, tensors)

    class _Pending:
        def __init__(self, own: ThreadCommunicator, tensors: dict[int, torch.Tensor]) -> None:
            self._own, self._tensors = own, tensors

        def wait(self) -> None:
            own, tensors = self._own, self._tensors
            with own._shared.changed:
                missing = set(range(own.world.size)) - set(tensors)
                own._wait(lambda: len(tensors) == own.world.size, missing)

    def _wait(self, is_done: Callable[[], bool], peers: set[int]) -> None:
        closed = self._shared.closed
        if not self._shared.changed.wait_for(lambda: is_done() or peers & closed, self.timeout_s):
            raise CommunicationTimeout(f"rank {self.world.rank} waited {self.timeout_s:g} s for ranks {sorted(peers)}")
        if not is_done():
            raise CommunicationError(f"ranks {sorted(peers & closed)} closed their communicator")
