"""Replicas inside one process: in one thread, in several, and what happens when one of them does something else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from paceline.comm import connect
from paceline.comm.local import LocalCommunicator, LocalGroup
from paceline.comm.single import SingleCommunicator
from paceline.core.errors import CommunicationError, CommunicationTimeout
from paceline.core.world import World


def group(size: int, timeout_s: float = 20.0) -> tuple[LocalCommunicator, ...]:
    return LocalGroup(["cpu"] * size, timeout_s).members


def test_members_know_their_place() -> None:
    for rank, member in enumerate(group(3)):
        world = member.world
        assert (world.rank, world.size, world.local_rank, world.local_size) == (rank, 3, rank, 3)
        assert world.device == torch.device("cpu")
        assert member.empty(5, torch.float64, world.device).shape == (5,)
    with pytest.raises(ValueError, match="a group needs at least one device"):
        LocalGroup([])


def test_one_thread_starts_all_then_waits_for_all() -> None:
    members = group(3)
    sums = [torch.full((2, 2), float(rank + 1)) for rank in range(3)]
    values = [torch.tensor([rank]) for rank in range(3)]
    pending = [m.all_reduce(t) for m, t in zip(members, sums, strict=True)]
    pending += [m.broadcast(t, source=2) for m, t in zip(members, values, strict=True)]
    for each in pending:
        each.wait()
    assert all(torch.equal(t, torch.full((2, 2), 6.0)) for t in sums)
    assert [t.item() for t in values] == [2, 2, 2]


# In float32 the three terms give another sum in any other order.
TERMS = [1e8, -1e8, 1.0]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_the_sum_is_taken_in_rank_order_whoever_comes_last(order: tuple[int, ...]) -> None:
    assert torch.tensor(TERMS[2]) + TERMS[1] + TERMS[0] != torch.tensor(TERMS[0]) + TERMS[1] + TERMS[2]
    members = group(3)
    tensors = [torch.tensor([term]) for term in TERMS]
    for rank in order:
        members[rank].all_reduce(tensors[rank])
    assert [t.item() for t in tensors] == [1.0, 1.0, 1.0]


def test_threads_make_many_exchanges_with_the_same_bits() -> None:
    size, rounds = 4, 50
    terms = torch.randn(rounds, size, 7, generator=torch.Generator().manual_seed(0))
    start = Barrier(size)

    def replica(member: LocalCommunicator) -> list[torch.Tensor]:
        rank, results = member.world.rank, []
        start.wait(10)
        for number in range(rounds):
            total, told = terms[number, rank].clone(), torch.tensor([rank])
            pending = member.all_reduce(total), member.broadcast(told, source=number % size)
            for each in pending:
                each.wait()
            results += [total, told]
        return results

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(replica, group(size)))
    for number in range(rounds):
        expected = terms[number, 0].clone()
        for rank in range(1, size):
            expected += terms[number, rank]
        for result in results:
            assert torch.equal(result[2 * number], expected)
            assert result[2 * number + 1].item() == number % size


def test_parameters_can_be_exchanged() -> None:
    parameters = [torch.nn.Parameter(torch.tensor([float(rank)])) for rank in range(2)]
    for member, parameter in zip(group(2), parameters, strict=True):
        member.broadcast(parameter, source=1)
    assert [p.item() for p in parameters] == [1.0, 1.0]
    assert all(p.is_leaf and p.requires_grad for p in parameters)


MISMATCHES = {
    "operation": (
        lambda m: m.broadcast(torch.zeros(2)),
        r"exchange 0: rank 1 calls broadcast from 0 on \(2,\) of torch.float32, rank 0 calls all_reduce on \(2,\)",
    ),
    "shape": (
        lambda m: m.all_reduce(torch.zeros(1, 2)),
        r"rank 1 calls all_reduce on \(1, 2\) of torch.float32, rank 0 calls all_reduce on \(2,\) of torch.float32",
    ),
    "dtype": (
        lambda m: m.all_reduce(torch.zeros(2, dtype=torch.int64)),
        r"rank 1 calls all_reduce on \(2,\) of torch.int64, rank 0 calls all_reduce on \(2,\) of torch.float32",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_different_calls_are_an_error_on_all(kind: str) -> None:
    other_call, text = MISMATCHES[kind]
    members = group(3)
    tensor = torch.ones(2)
    pending = [members[0].all_reduce(tensor), other_call(members[1]), members[2].all_reduce(torch.ones(2))]
    for each in pending:
        with pytest.raises(CommunicationError, match=text + ".*all replicas must make the same calls"):
            each.wait()
    assert torch.equal(tensor, torch.ones(2)), "a failed exchange leaves the tensors alone"


def test_different_sources_are_an_error_on_all() -> None:
    members = group(2)
    for each in [members[0].broadcast(torch.zeros(1), 0), members[1].broadcast(torch.zeros(1), 1)]:
        with pytest.raises(
            CommunicationError, match=r"rank 1 calls broadcast from 1 .*, rank 0 calls broadcast from 0"
        ):
            each.wait()
    with pytest.raises(ValueError, match="source=2 is not a rank in a world of 2"):
        members[0].broadcast(torch.zeros(1), 2)


def test_an_exchange_that_cannot_be_carried_out_is_an_error_on_all() -> None:
    members = group(2)
    pending = [member.all_reduce(torch.zeros(1).expand(4)) for member in members]  # four elements in one place
    for each in pending:
        with pytest.raises(CommunicationError, match=r"all_reduce on \(4,\) of torch.float32 failed: unsupported"):
            each.wait()


def test_a_time_out_names_who_is_missing() -> None:
    members = group(4, timeout_s=0.05)
    pending = [members[rank].all_reduce(torch.zeros(1)) for rank in (0, 2)]
    for rank, each in zip((0, 2), pending, strict=True):
        with pytest.raises(CommunicationTimeout) as caught:
            each.wait()
        assert str(caught.value) == (
            f"rank {rank} waited timeout_s=0.05 s in all_reduce on (1,) of torch.float32: "
            "replicas [1, 3] did not call it"
        )


def test_a_replica_that_left_is_an_error_and_no_wait() -> None:
    members = group(3, timeout_s=600.0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(members[0].all_reduce(torch.zeros(1)).wait)
        members[2].close()
        with pytest.raises(CommunicationError, match=r"replica 2 closed its communicator before all_reduce on \(1,\)"):
            waiting.result(10)
    for late in (members[1].all_reduce(torch.zeros(1)), members[1].broadcast(torch.zeros(1))):
        with pytest.raises(CommunicationError, match="replica 2 closed its communicator"):
            late.wait()


def test_a_replica_may_leave_once_it_has_arrived() -> None:
    first, second = group(2)
    tensors = [torch.ones(1), torch.ones(1)]
    pending = first.all_reduce(tensors[0])
    first.close()
    second.all_reduce(tensors[1]).wait()
    pending.wait()
    assert [t.item() for t in tensors] == [2.0, 2.0]


def test_a_world_of_one_exchanges_nothing() -> None:
    alone = connect(World())
    assert isinstance(alone, SingleCommunicator)
    tensor = torch.tensor([3.0])
    alone.all_reduce(tensor).wait()
    alone.broadcast(tensor).wait()
    alone.close()
    assert tensor.item() == 3.0
    assert alone.empty(4, torch.float32, torch.device("cpu")).shape == (4,)
    with pytest.raises(ValueError, match="serves a world of 1 worker, not 2"):
        SingleCommunicator(World(0, 2))


def test_what_is_sent_arrives_in_order_and_by_value() -> None:
    first, second = group(2)
    sent = torch.tensor([1.0, 2.0])
    first.send(sent, to=1)
    sent.fill_(9.0)
    first.send(sent, to=1)
    received = torch.empty(2)
    second.receive(received, source=0)
    assert received.tolist() == [1.0, 2.0]
    second.receive(received, source=0)
    assert received.tolist() == [9.0, 9.0]


def test_receiving_what_nobody_sends_ends_with_an_error() -> None:
    first, second = group(2, timeout_s=0.05)
    with pytest.raises(
        CommunicationTimeout, match=r"rank 1 waited timeout_s=0.05 s in receive: replica 0 did not send"
    ):
        second.receive(torch.empty(1), source=0)
    first.send(torch.ones(1), to=1)
    first.close()
    second.receive(torch.empty(1), source=0)  # it was sent before
    with pytest.raises(CommunicationError, match="replica 0 closed its communicator before it sent to rank 1"):
        second.receive(torch.empty(1), source=0)
