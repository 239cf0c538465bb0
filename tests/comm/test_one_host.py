"""CPU workers of one host: any tensor goes through memory, and nothing is opened that others could reach."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psutil
import pytest
import torch
from worker_pool import WorkerPool

from paceline.comm import connect
from paceline.comm.shared_memory.one_host import SCRATCH_BYTES, OneHostCommunicator
from paceline.core.errors import CommunicationError
from paceline.core.world import World

NUMELS = [1, 127, 129, 5000, 9000, SCRATCH_BYTES[-1] // 4, 2 * SCRATCH_BYTES[-1] // 4 + 3]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


def join() -> OneHostCommunicator:
    communicator = connect(World.from_environment(), timeout_s=20.0)
    assert isinstance(communicator, OneHostCommunicator)
    return communicator


def exchange_everything() -> None:
    with closing(join()) as communicator:
        rank, size = communicator.world.rank, communicator.world.size
        total = size * (size + 1) // 2
        for dtype in DTYPES:
            for numel in NUMELS:
                tensor = torch.full((numel,), rank + 1, dtype=dtype)
                communicator.all_reduce(tensor).wait()
                assert (tensor == total).all(), (dtype, numel)
                tensor = torch.full((numel,), rank + 1, dtype=dtype)
                communicator.broadcast(tensor, size - 1).wait()
                assert (tensor == size).all(), (dtype, numel)
        scattered = torch.full((4, 6), rank + 1.0).t()[::2]
        communicator.all_reduce(scattered).wait()
        assert (scattered == total).all()
        flags = torch.tensor([rank == 0, False])
        communicator.broadcast(flags, 0).wait()
        assert flags.tolist() == [True, False]
        parameter = torch.nn.Parameter(torch.full((3, 3), float(rank)).t())
        communicator.broadcast(parameter, 1).wait()
        assert (parameter == 1).all()
        communicator.all_reduce(torch.empty(0)).wait()


@pytest.mark.parametrize("size", [2, 3])
def test_any_tensor_is_exchanged(size: int, pool: WorkerPool) -> None:
    pool.run(exchange_everything, size)


def start_many_then_wait_in_another_order() -> list[float]:
    with closing(join()) as communicator:
        shared = communicator.empty(3, torch.float32, torch.device("cpu")).fill_(1)
        tensors = [torch.full((1 + 1000 * (i % 3),), float(i)) for i in range(20)]
        pending = [communicator.all_reduce(t) if i % 2 else communicator.broadcast(t) for i, t in enumerate(tensors)]
        pending.append(communicator.all_reduce(shared))
        for each in reversed(pending) if communicator.world.rank else pending:
            each.wait()
            each.wait()
        assert all((t == t[0]).all() for t in tensors)
        return [t[0].item() for t in (*tensors, shared)]


@pytest.mark.parametrize("size", [2, 3])
def test_calls_are_paired_by_their_order(size: int, pool: WorkerPool) -> None:
    expected = [float(size) * i if i % 2 else float(i) for i in range(20)]
    assert pool.run(start_many_then_wait_in_another_order, size) == [[*expected, float(size)]] * size


def call_differently() -> str:
    with closing(join()) as communicator, pytest.raises(CommunicationError) as caught:
        communicator.all_reduce(torch.zeros(3 + communicator.world.rank)).wait()
    return str(caught.value)


def test_different_calls_are_an_error(pool: WorkerPool) -> None:
    first, _ = pool.run(call_differently, 2)
    assert "all_reduce (3 copied) of 128 numbers of torch.float32" in first
    assert "every worker must make the same calls in the same order" in first


def opened_meanwhile() -> tuple[Any, ...]:
    me = psutil.Process()
    before = me.net_connections("all")
    with closing(join()):
        return tuple(set(me.net_connections("all")) - set(before))


def test_nothing_is_opened(pool: WorkerPool) -> None:
    assert pool.run(opened_meanwhile, 3) == [()] * 3
