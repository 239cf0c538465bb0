"""Workers in processes of their own, over Gloo: sums, order, and errors instead of hangs."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from contextlib import closing
from time import monotonic
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from gatherings import together
from worker_pool import WorkerPool

import paceline as pl
from paceline.comm import connect
from paceline.comm.process_group import ProcessGroupCommunicator, default_backend
from paceline.comm.rendezvous import Rendezvous, RendezvousPoint
from paceline.core.secret import run_secret
from paceline.core.world import World

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def join(timeout_s: float = 20.0) -> ProcessGroupCommunicator:
    communicator = connect(World.from_environment(), "gloo", timeout_s=timeout_s)
    assert isinstance(communicator, ProcessGroupCommunicator)
    return communicator


def error_of(call: Callable[[], Any]) -> tuple[str, str, float]:
    """The type and text of what `call` raises, and the seconds until it does."""
    started = monotonic()
    try:
        call()
    except pl.PacelineError as error:
        return type(error).__name__, str(error), monotonic() - started
    return "", "nothing was raised", monotonic() - started


def exchange_everything() -> dict[str, Any]:
    communicator = join()
    rank, size = communicator.world.rank, communicator.world.size
    total = torch.full((3, 2), float(rank + 1), dtype=torch.float64)
    communicator.all_reduce(total).wait()
    told = [torch.full((2,), rank) for _ in range(size)]
    for source, tensor in enumerate(told):
        communicator.broadcast(tensor, source).wait()
    space = communicator.empty(5, torch.float64, CPU)
    communicator.close()
    return {"total": total, "told": told, "space": (space.shape, space.dtype, space.device)}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_and_broadcast(size: int, pool: WorkerPool) -> None:
    for result in pool.run(exchange_everything, size):
        assert torch.equal(result["total"], torch.full((3, 2), size * (size + 1) / 2, dtype=torch.float64))
        assert [tensor.tolist() for tensor in result["told"]] == [[source] * 2 for source in range(size)]
        assert result["space"] == ((5,), torch.float64, CPU)


def start_many_then_wait_backwards() -> list[float]:
    communicator = join()
    tensors = [torch.full((1 + 1000 * (i % 3),), float(i)) for i in range(20)]
    pending = [communicator.all_reduce(t) if i % 2 else communicator.broadcast(t) for i, t in enumerate(tensors)]
    for each in reversed(pending):
        each.wait()
    assert all((t == t[0]).all() for t in tensors)
    communicator.close()
    return [t[0].item() for t in tensors]


def test_calls_are_paired_by_their_order(pool: WorkerPool) -> None:
    for result in pool.run(start_many_then_wait_backwards, 3):
        assert result == [3.0 * i if i % 2 else float(i) for i in range(20)]


def beside_the_default_group() -> tuple[float, float, float]:
    """Our exchanges are under way while the user's and another trainer's run, on other groups."""
    ours, theirs = join(), join()
    tensors = [torch.ones(1), torch.full((1,), 10.0), torch.full((1,), 100.0)]
    pending = [ours.all_reduce(tensors[0])]
    if ours.world.rank == 0:  # in another order than the other workers: legal only on separate groups
        dist.all_reduce(tensors[2])
        pending.append(theirs.all_reduce(tensors[1]))
    else:
        pending.append(theirs.all_reduce(tensors[1]))
        dist.all_reduce(tensors[2])
    for each in pending:
        each.wait()
    theirs.close()
    ours.all_reduce(tensors[0]).wait()
    ours.close()
    dist.all_reduce(tensors[2])  # the default group was there before, and still is
    return tuple(t.item() for t in tensors)


def test_a_group_of_its_own_beside_the_default_group(pool: WorkerPool) -> None:
    assert pool.run(beside_the_default_group, 2) == [(4.0, 20.0, 400.0)] * 2


def last_rank_does_not_come() -> tuple[str, str, float]:
    communicator = join(timeout_s=0.5)
    communicator.all_reduce(torch.zeros(1)).wait()
    result = ("", "", 0.0)
    if communicator.world.rank < communicator.world.size - 1:
        result = error_of(lambda: communicator.all_reduce(torch.zeros(1)).wait())
    dist.barrier()
    communicator.close()
    return result


@pytest.mark.parametrize("size", [2, 3])
def test_a_worker_that_does_not_come_is_a_time_out(size: int, pool: WorkerPool) -> None:
    results = pool.run(last_rank_does_not_come, size)[:-1]
    timeouts = 0
    for rank, (name, text, seconds) in enumerate(results):
        assert seconds < 10
        if name == "CommunicationTimeout":
            timeouts += 1
            assert text == (
                f"rank {rank} waited timeout_s=0.5 s in all_reduce, and not all {size} workers arrived: "
                "the others hang, or need more time than timeout_s"
            )
        else:  # it came later than the one that timed out, which closed the connection
            assert name == "CommunicationError"
            assert f"rank {rank} lost contact with the other workers in all_reduce" in text
    assert timeouts


def last_rank_does_not_join() -> tuple[str, str, float]:
    world = World.from_environment()
    result = error_of(lambda: join(timeout_s=0.5)) if world.rank < world.size - 1 else ("", "", 0.0)
    dist.barrier()
    return result


def test_a_worker_that_does_not_join_is_a_time_out(pool: WorkerPool) -> None:
    name, text, seconds = pool.run(last_rank_does_not_join, 2)[0]
    assert name == "CommunicationTimeout"
    assert text == "rank 0 waited 0.5 s for the world of 2 workers: ranks [1] did not join"
    assert seconds < 10


def last_rank_leaves() -> tuple[str, str, float]:
    communicator = join(timeout_s=60.0)
    communicator.all_reduce(torch.zeros(1)).wait()
    if communicator.world.rank == communicator.world.size - 1:
        communicator.close()
        return "", "", 0.0
    result = error_of(lambda: communicator.all_reduce(torch.zeros(1)).wait())
    communicator.close()
    return result


@pytest.mark.parametrize("size", [2, 3])
def test_a_worker_that_left_is_an_error_and_no_wait(size: int, pool: WorkerPool) -> None:
    for rank, (name, text, seconds) in enumerate(pool.run(last_rank_leaves, size)[:-1]):
        assert name == "CommunicationError"
        assert text.startswith(f"rank {rank} lost contact with the other workers in all_reduce: ")
        assert seconds < 10


def close_and_keep() -> tuple[int, int, list[str]]:
    me = psutil.Process()
    before = len(me.net_connections())
    communicator = join()
    communicator.all_reduce(torch.zeros(1)).wait()
    while_open = len(me.net_connections())
    dist.barrier()
    communicator.close()
    communicator.close()
    calls = (communicator.all_reduce, communicator.broadcast)
    errors = [error_of(lambda call=call: call(torch.zeros(1)))[1] for call in calls]
    return while_open - before, len(me.net_connections()) - before, errors


def test_a_closed_communicator_holds_nothing_and_takes_no_calls(pool: WorkerPool) -> None:
    for more_while_open, more_afterwards, errors in pool.run(close_and_keep, 2):
        assert more_while_open > 0
        assert more_afterwards <= 0
        assert errors == ["the communicator is closed and accepts no exchange"] * 2


@pytest.mark.parametrize(
    ("present", "named"),
    [
        ({}, "MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_PORT": "29500"}, "MASTER_ADDR"),
        ({"MASTER_ADDR": "localhost"}, "MASTER_PORT"),
    ],
)
def test_variables_that_are_missing_are_named(
    present: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in present.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=f"RANK and WORLD_SIZE are set but not {named}: start the script with torchrun, "
    ):
        connect(World(0, 2, 0, 2))


@pytest.mark.parametrize(
    ("device", "local_size", "num_gpus", "expected"),
    [
        (CPU, 1, 0, "gloo"),
        (CPU, 4, 2, "gloo"),
        (GPU, 1, 1, "nccl"),
        (GPU, 2, 2, "nccl"),
        (GPU, 2, 4, "nccl"),
        (GPU, 3, 2, "gloo"),
    ],
)
def test_nccl_where_every_worker_has_a_gpu_of_its_own(
    device: torch.device, local_size: int, num_gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    assert default_backend(World(0, 8, 0, local_size, device=device)) == expected


def test_workers_of_one_host_share_memory_unless_a_backend_is_named(pool: WorkerPool) -> None:
    def kinds() -> list[str]:
        world = World.from_environment()
        found = []
        for backend in (None, "gloo"):
            with closing(connect(world, backend)) as communicator:
                found.append(type(communicator).__name__)
        return found

    assert pool.run(kinds, 2) == [["SharedMemoryCommunicator", "ProcessGroupCommunicator"]] * 2


def nested_on_any_backend(backend: str) -> list[float]:
    """Twice, closed in the order of their opening."""
    world = World.from_environment()
    found = []
    for _ in range(2):
        communicators = [ProcessGroupCommunicator(world, backend, 20.0) for _ in range(2)]
        for communicator in communicators:
            tensor = torch.ones(2)
            communicator.all_reduce(tensor).wait()
            communicator.broadcast(tensor, 1).wait()
            communicator.close()
            found.append(tensor.sum().item())
    return found


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_communicators_of_any_backend_one_after_another(backend: str, pool: WorkerPool) -> None:
    assert pool.run(nested_on_any_backend, 2, backend) == [[4.0] * 4] * 2


def test_other_backends_need_the_default_group() -> None:
    store = dist.HashStore()
    worlds = [World(rank, 2, rank, 2) for rank in range(2)]
    calls = [
        lambda w=w: ProcessGroupCommunicator(w, "mpi", 5.0, Rendezvous(w, 5.0, at=RendezvousPoint(store)))
        for w in worlds
    ]
    for error in together(calls):
        assert isinstance(error, ValueError)
        assert str(error).startswith("backend='mpi' needs the default group: call torch.distributed.init_process_group")


def abort_while_others_wait(numel: int) -> tuple[str, str, float]:
    """Rank 0 aborts; the others are in an exchange or start one afterwards."""
    with closing(join(timeout_s=60.0)) as communicator:
        communicator.all_reduce(torch.zeros(numel)).wait()
        if communicator.world.rank == 0:
            communicator.abort()
        found = error_of(lambda: communicator.all_reduce(torch.zeros(numel)).wait())
        total = torch.ones(1)
        dist.all_reduce(total)  # other groups are not affected
        assert total.item() == communicator.world.size
        return found


@pytest.mark.parametrize("size", [2, 3])
def test_an_abort_fails_exchanges_on_all_workers(size: int, pool: WorkerPool) -> None:
    for rank, (name, text, seconds) in enumerate(pool.run(abort_while_others_wait, size, 10)):
        assert name == "CommunicationError"
        assert text.startswith(f"rank {rank} lost contact with the other workers in all_reduce: ")
        assert seconds < 10


def abort_a_receive() -> tuple[str, str, float]:
    """Another thread of the receiver aborts, as a closing feed does."""
    with closing(join(timeout_s=60.0)) as communicator:
        if communicator.world.rank == 0:
            return error_of(lambda: communicator.receive(torch.empty(1), 1))
        threading.Timer(0.2, communicator.abort).start()
        return error_of(lambda: communicator.receive(torch.empty(1), 0))


def test_an_abort_fails_a_receive_on_both_sides(pool: WorkerPool) -> None:
    for name, text, seconds in pool.run(abort_a_receive, 2):
        assert name == "CommunicationError", text
        assert seconds < 10


def with_a_secret() -> float:
    os.environ["PACELINE_SECRET"] = "0123456789abcdef"
    try:
        world = World.from_environment()
        with closing(connect(world, timeout_s=20.0)) as memory, closing(connect(world, "gloo", 20.0)) as gloo:
            gc.collect()
            tensor = torch.ones(1)
            for communicator in (memory, gloo):
                communicator.all_reduce(tensor).wait()
            return tensor.item()
    finally:
        del os.environ["PACELINE_SECRET"]


@pytest.mark.parametrize("size", [2, 3])
def test_workers_with_a_secret_meet_as_well(size: int, pool: WorkerPool) -> None:
    assert pool.run(with_a_secret, size) == [float(size**2)] * size


def with_a_secret_each() -> str:
    world = World.from_environment()
    os.environ["PACELINE_SECRET"] = f"0123456789abcde{world.rank}"
    try:
        return error_of(lambda: connect(world, "gloo", 1.0))[1]
    finally:
        del os.environ["PACELINE_SECRET"]


def test_workers_with_different_secrets_do_not_meet(pool: WorkerPool) -> None:
    first, second = pool.run(with_a_secret_each, 2)
    assert first == "rank 0 waited 1 s for the world of 2 workers: ranks [1] did not join"
    assert second == "rank 1 waited 1 s for the world of 2 workers: ranks [0] did not join"


def planted() -> str:
    """What somebody else writes into the store, who knows its keys."""
    os.environ["PACELINE_SECRET"] = "0123456789abcdef"
    try:
        world = World.from_environment()
        if world.rank == 1:
            secret = run_secret()
            assert secret is not None
            store = dist.PrefixStore(secret.name("start-0"), dist.distributed_c10d._get_default_store())
            store.set("at/1", "0" * 80)
            return ""
        return error_of(lambda: connect(world, "gloo", 10.0))[1]
    finally:
        del os.environ["PACELINE_SECRET"]


def test_values_that_somebody_else_wrote_are_an_error(pool: WorkerPool) -> None:
    text, _ = pool.run(planted, 2)
    assert text == (
        "rank 0 found a forged value in the rendezvous store: the value of at/1 was not written by a worker of this "
        "run: another process interferes, or the secrets differ"
    )
