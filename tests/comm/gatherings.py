"""Workers of a world as threads of one process: they share memory and connect over Gloo as processes would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.comm.base import Communicator
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.comm.rendezvous import Rendezvous, RendezvousPoint
from paceline.comm.shared_memory.communicator import SharedMemoryCommunicator
from paceline.comm.shared_memory.peers import placement
from paceline.core.world import World

CPU = torch.device("cpu")


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Each call in its own thread; all results, errors among them."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(outcome, calls))


def worlds_of(sizes: Sequence[int], host: str = "host-{}") -> list[World]:
    """The worlds of all workers, with this many on each host."""
    size = sum(sizes)
    places = [(i, n, h) for h, n in enumerate(sizes) for i in range(n)]
    return [World(rank, size, i, n, host.format(h)) for rank, (i, n, h) in enumerate(places)]


@contextmanager
def over_gloo(size: int, timeout_s: float = 20.0) -> Iterator[list[ProcessGroupCommunicator]]:
    """The workers of one host, in one process group."""
    store = dist.HashStore()

    def join(world: World) -> ProcessGroupCommunicator:
        return ProcessGroupCommunicator(world, "gloo", timeout_s, Rendezvous(world, 20.0, at=RendezvousPoint(store)))

    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(each)) for each in together([lambda w=w: join(w) for w in worlds_of([size])])
        ]


def join_all(sizes: Sequence[int], timeout_s: float = 20.0) -> list[Any]:
    """The communicators of all workers, or their errors."""
    store = dist.HashStore()

    def join(world: World) -> SharedMemoryCommunicator:
        return SharedMemoryCommunicator(
            world, timeout_s, Rendezvous(world, 20.0, placement(world), RendezvousPoint(store))
        )

    return together([lambda w=w: join(w) for w in worlds_of(sizes)])


@contextmanager
def on_hosts(sizes: Sequence[int], timeout_s: float = 20.0) -> Iterator[list[SharedMemoryCommunicator]]:
    """The workers of several hosts, with this many on each."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        communicators = join_all(sizes, timeout_s)
        assert not [each for each in communicators if isinstance(each, Exception)]
        for communicator in communicators:
            stack.callback(communicator.close)
        yield communicators


def sharing(size: int, timeout_s: float = 20.0) -> Any:
    """The workers of one host."""
    return on_hosts([size], timeout_s)


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
