"""Workers of a world as threads of one process: their memory is shared all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from paceline.comm.base import Communicator, Pending
from paceline.comm.host_topology import find_hosts
from paceline.comm.hosts import HostsCommunicator
from paceline.comm.local import LocalCommunicator, LocalGroup
from paceline.comm.shared_memory.communicator import SharedMemoryCommunicator
from paceline.core.world import World

CPU = torch.device("cpu")


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Each call in a thread of its own; all results, errors among them."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(outcome, calls))


@contextmanager
def replicas(size: int, timeout_s: float = 20.0) -> Iterator[list[LocalCommunicator]]:
    """The members of a `LocalGroup`."""
    members = LocalGroup(["cpu"] * size, timeout_s).members
    try:
        yield list(members)
    finally:
        for member in members:
            member.close()


@contextmanager
def sharing(size: int, timeout_s: float = 20.0) -> Iterator[list[SharedMemoryCommunicator]]:
    """The workers of one host."""
    members = LocalGroup(["cpu"] * size, 20.0).members
    communicators = together([lambda m=m: SharedMemoryCommunicator(m) for m in members])
    for member in members:
        member.timeout_s = timeout_s  # from here on: they shall meet, even on a busy machine
    with ExitStack() as stack:
        for communicator in communicators:
            stack.callback(communicator.close)
        yield communicators


class LocalLeaders:
    """The leaders of hosts inside this process. As with connections that are shut down, an abort reaches all."""

    def __init__(self, group: LocalGroup, place: int | None) -> None:
        self._group = group
        self._place = place

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._group.members[self._place].all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        return self._group.members[self._place].broadcast(tensor, source)

    def abort(self) -> None:
        self.close()
        for meeting in list(self._group._meetings.values()):
            meeting.fail(f"host {self._place} gave it up")

    def close(self) -> None:
        if self._place is not None:
            self._group.leave(self._place)


@contextmanager
def on_hosts(sizes: Sequence[int], timeout_s: float = 20.0) -> Iterator[list[HostsCommunicator]]:
    """The workers of several hosts, with so many on each."""
    size = sum(sizes)
    members = LocalGroup(["cpu"] * size, 20.0).members
    across = LocalGroup(["cpu"] * len(sizes), timeout_s)
    for host, num_workers in enumerate(sizes):
        for local_rank in range(num_workers):
            rank = sum(sizes[:host]) + local_rank
            members[rank].world = World(rank, size, local_rank, num_workers, f"host-{host}")

    def join(member: LocalCommunicator) -> HostsCommunicator:
        def leaders(ranks: Sequence[int]) -> LocalLeaders:
            return LocalLeaders(across, ranks.index(member.world.rank) if member.world.rank in ranks else None)

        return HostsCommunicator(member, find_hosts(member), leaders)

    communicators = together([lambda m=m: join(m) for m in members])
    for member in members:
        member.timeout_s = timeout_s
    with ExitStack() as stack:
        for communicator in communicators:
            stack.callback(communicator.close)
        yield communicators


def buffers(workers: Sequence[Communicator], numel: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """A buffer on each worker, filled with its rank plus one."""
    return [w.empty(numel, dtype, CPU).fill_(w.world.rank + 1) for w in workers]


def terms(size: int, numel: int) -> torch.Tensor:
    """Values, by rank, whose sum depends on the order of the additions."""
    values = torch.randn(size, numel, generator=torch.Generator().manual_seed(0))
    return values.mul_(torch.tensor([0.01, 1.0, 300.0]).repeat(numel)[:numel])


def sum_in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
