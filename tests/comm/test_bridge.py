"""Workers on several hosts: who adds up what, what the leaders do meanwhile, and errors that reach every host."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from gatherings import CPU, buffers, join_all, on_hosts, sum_in_rank_order, terms, together, worlds_of
from waiting import wait_until
from worker_pool import WorkerPool

from paceline.comm import connect
from paceline.comm.shared_memory import bridge as bridge_module
from paceline.comm.shared_memory import segment
from paceline.comm.shared_memory.buffers import PIECE_BYTES
from paceline.comm.shared_memory.communicator import SharedMemoryCommunicator
from paceline.comm.shared_memory.peers import SharedMemoryUnavailable, find_hosts, placement
from paceline.core.errors import CommunicationError, CommunicationTimeout, MisuseError, PacelineError
from paceline.core.world import World

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
# In float32, on two hosts: of three pieces, with an odd rest.
PIECES = 4 * PIECE_BYTES // 4 + 3


def join(sizes: Sequence[int], timeout_s: float = 20.0) -> SharedMemoryCommunicator:
    communicator = connect(worlds_of(sizes)[int(os.environ["RANK"])], timeout_s=timeout_s)
    assert isinstance(communicator, SharedMemoryCommunicator)
    assert communicator.num_hosts == len(sizes)
    return communicator


# Sums.


def sum_everything(sizes: list[int], numels: list[int]) -> list[torch.Tensor]:
    communicator = join(sizes)
    results = []
    for numel in numels:
        for dtype in DTYPES:
            tensor = communicator.empty(numel, dtype, CPU)
            tensor.copy_(terms(sum(sizes), numel)[communicator.world.rank])
            communicator.all_reduce(tensor).wait()
            results.append(tensor.clone())
    communicator.close()
    return results


@pytest.mark.parametrize("sizes", [[2, 2], [3, 1], [1, 2, 1]])
def test_all_hold_the_same_bits_and_hosts_add_up_in_rank_order(sizes: list[int], pool: WorkerPool) -> None:
    numels = [1, 7, 50_001, PIECES]
    by_rank = pool.run(sum_everything, sum(sizes), sizes, numels)
    for results in by_rank:
        assert all(map(torch.equal, results, by_rank[0]))
    for result, (numel, dtype) in zip(by_rank[0], product(numels, DTYPES), strict=True):
        values = terms(sum(sizes), numel).to(dtype)
        parts = iter(values)
        expected = sum_in_rank_order([sum_in_rank_order([next(parts) for _ in range(n)]) for n in sizes])
        if len(sizes) == 2 or dtype == torch.int64:
            assert torch.equal(result, expected)
        else:  # with more hosts the order among them is Gloo's
            bound = 4 * torch.finfo(dtype).eps * values.double().abs().sum(0)
            assert ((result.double() - expected.double()).abs() <= bound).all()


def test_an_exchange_goes_on_while_all_workers_compute() -> None:
    with on_hosts([2, 2]) as workers:
        small, large = buffers(workers, 3), buffers(workers, PIECES)
        pending = [w.all_reduce(t) for tensors in (small, large) for w, t in zip(workers, tensors, strict=True)]
        wait_until(lambda: all((t == 10).all() for t in small + large))  # nobody called wait()
        for each in pending:
            each.wait()
            each.wait()


@pytest.mark.parametrize("numel", [3, PIECES])
def test_who_has_the_result_may_go_on_while_others_are_busy(numel: int) -> None:
    with on_hosts([2, 2]) as workers:
        tensors = buffers(workers, numel)
        pending = [w.all_reduce(t) for w, t in zip(workers, tensors, strict=True)]
        pending[0].wait()
        tensors[0].fill_(100)
        for each in pending[1:]:
            each.wait()
        assert [t[-1].item() for t in tensors] == [100, 10, 10, 10]


def many_with_delays(sizes: list[int], count: int) -> list[int]:
    communicator = join(sizes)
    rank, size = communicator.world.rank, communicator.world.size
    pauses = random.Random(rank)
    tensors = [communicator.empty(numel, torch.float64, CPU) for numel in (3, 40_000, 200_000)]
    private = torch.empty(5)
    wrong: list[int] = []
    for i in range(count):
        chosen = [tensors[0], tensors[0], private, *tensors][i % 4 :: 4] or tensors[:1]
        for number, tensor in enumerate(chosen):
            tensor.fill_((i + number) * (rank + 1))
        pending = [communicator.all_reduce(t) for t in chosen]
        if pauses.random() < 0.1:
            sleep(pauses.random() * 2e-3)
        for each in reversed(pending) if rank else pending:
            each.wait()
        if not all((t == (i + number) * size * (size + 1) / 2).all() for number, t in enumerate(chosen)):
            wrong.append(i)
    communicator.close()
    return wrong


@pytest.mark.parametrize("sizes", [[2, 1], [2, 2]])
def test_many_exchanges_with_workers_that_come_late(sizes: list[int], pool: WorkerPool) -> None:
    assert pool.run(many_with_delays, sum(sizes), sizes, 300) == [[]] * sum(sizes)


# What goes wrong.


def test_a_time_out_names_who_is_missing_on_the_host() -> None:
    with on_hosts([3, 1], timeout_s=0.2) as workers:
        tensors = buffers(workers, 3)
        errors = together([workers[rank].all_reduce(tensors[rank]).wait for rank in (0, 2)])
        for error in errors:
            assert isinstance(error, CommunicationTimeout)
            assert str(error) == (
                "rank 0 waited timeout_s=0.2 s in all_reduce of 3 elements of torch.float32 "
                "(buffer 0 at offset 36864): ranks [1] did not call it"
            )


def test_a_time_out_says_on_which_hosts_somebody_is_missing() -> None:
    with on_hosts([2, 2], timeout_s=0.2) as workers:
        tensors = buffers(workers, 3)
        for error in together([workers[rank].all_reduce(tensors[rank]).wait for rank in (0, 1)]):
            assert isinstance(error, CommunicationTimeout)
            assert str(error) == (
                "rank 0 waited timeout_s=0.2 s in all_reduce of 3 elements of torch.float32 (buffer 0 at offset 36864)"
                ": all workers of this host called it, but not all of ranks [2, 3] on other hosts did"
            )


def test_after_an_error_nothing_is_exchanged_any_more() -> None:
    with on_hosts([2, 1], timeout_s=0.2) as workers:
        tensors = buffers(workers, 3)
        pending = [workers[rank].all_reduce(tensors[rank]) for rank in (0, 1)]
        together([each.wait for each in pending])
        for worker, tensor, each in zip(workers[:2], tensors[:2], pending, strict=True):
            calls = (
                each.wait,
                lambda w=worker, t=tensor: w.all_reduce(t),
                lambda w=worker: w.broadcast(torch.zeros(1)),
                lambda w=worker: w.empty(1, torch.float32, CPU),
            )
            for call in calls:
                with pytest.raises(CommunicationError, match="no exchange is possible after this error: rank 0 wait"):
                    call()


def test_an_error_on_the_network_is_reported_at_the_next_call_too() -> None:
    with on_hosts([2, 1], timeout_s=60.0) as workers:
        tensors = buffers(workers, 3)
        pending = [workers[rank].all_reduce(tensors[rank]) for rank in (0, 1)]
        workers[2].close()
        with pytest.raises(CommunicationError, match="rank 0 stopped after an error before all_reduce of 3"):
            pending[1].wait()
        message = "no exchange is possible after this error: rank 0 lost contact with the other hosts in all_reduce of"
        with pytest.raises(CommunicationError, match=message):
            workers[0].empty(3, torch.float32, CPU)


def test_another_call_on_the_same_host_is_an_error_on_every_host() -> None:
    with on_hosts([2, 2], timeout_s=60.0) as workers:
        one, other = buffers(workers, 3), buffers(workers, 3)
        pending = [workers[0].all_reduce(one[0]), workers[1].all_reduce(other[1])]
        pending += [workers[rank].all_reduce(one[rank]) for rank in (2, 3)]
        errors = together([each.wait for each in pending])
        assert all(type(error) is CommunicationError for error in errors)
        for error in errors[:2]:
            assert "exchange 0: rank 0 calls all_reduce of 3 elements of torch.float32 (buffer 0 at" in str(error)
            assert str(error).endswith("all workers must make the same calls in the same order")


def test_another_call_is_noticed_where_nobody_waits() -> None:
    with on_hosts([2, 2], timeout_s=60.0) as workers:
        one, other = buffers(workers, 3), buffers(workers, 3)
        workers[0].all_reduce(one[0])
        workers[1].all_reduce(other[1])
        pending = [workers[rank].all_reduce(one[rank]) for rank in (2, 3)]
        assert [type(error) for error in together([each.wait for each in pending])] == [CommunicationError] * 2


def test_a_leader_that_computes_tells_its_host_what_happened_on_the_network() -> None:
    with on_hosts([2, 2], timeout_s=60.0) as workers:
        tensors = buffers(workers, 3)
        pending = [w.all_reduce(t) for w, t in zip(workers[:2], tensors[:2], strict=True)]
        workers[2].close()
        message = r"^rank 0 stopped after an error before all_reduce of 3 .*: rank 0 lost contact with the other "
        with pytest.raises(CommunicationError, match=message):
            pending[1].wait()


def test_what_happened_is_told_also_to_who_looks_after_the_leader_has_closed() -> None:
    with on_hosts([2, 1], timeout_s=0.2) as workers:
        tensors = buffers(workers, 3)
        pending = [w.all_reduce(t) for w, t in zip(workers[:2], tensors[:2], strict=True)]
        with pytest.raises(CommunicationTimeout) as caught:
            pending[0].wait()
        workers[0].close()
        with pytest.raises(CommunicationTimeout) as seen:
            pending[1].wait()
        assert str(seen.value) == str(caught.value)


def test_a_leader_that_is_interrupted_tells_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with on_hosts([2, 2], timeout_s=60.0) as workers:
        tensors = buffers(workers, 3)
        pending = [workers[rank].all_reduce(tensors[rank]) for rank in (0, 1, 2)]
        monkeypatch.setattr(workers[0]._peers, "wait_for_leader", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pending[0].wait()
        pending.append(workers[3].all_reduce(tensors[3]))
        assert [type(error) for error in together([each.wait for each in pending[1:]])] == [CommunicationError] * 3


def test_a_leader_closes_though_a_worker_of_its_host_has_not_called() -> None:
    with on_hosts([2, 1], timeout_s=60.0) as workers:
        tensors = buffers(workers, 3)
        pending = workers[2].all_reduce(tensors[2])
        workers[0].all_reduce(tensors[0])
        started = monotonic()
        workers[0].close()
        assert monotonic() - started < 10
        with pytest.raises(CommunicationError):
            pending.wait()


def test_a_host_learns_of_a_worker_that_left_while_its_leader_computes() -> None:
    with on_hosts([2, 2], timeout_s=60.0) as workers:
        tensors = buffers(workers, 3)
        workers[1].close()
        started = monotonic()
        errors = together([workers[rank].all_reduce(tensors[rank]).wait for rank in (2, 3)])  # rank 0 makes no call
        assert all(type(error) is CommunicationError for error in errors)
        assert monotonic() - started < 10
        assert "rank 2 stopped after an error before all_reduce of 3 elements" in str(errors[1])
        with pytest.raises(CommunicationError, match="rank 1 closed its communicator"):
            workers[0].all_reduce(tensors[0]).wait()


def test_a_worker_may_close_once_it_has_started() -> None:
    with on_hosts([2, 1]) as workers:
        tensors = buffers(workers, 3)
        workers[1].all_reduce(tensors[1])
        workers[1].close()
        sleep(0.6)  # longer than a leader without work takes to look around
        errors = together([workers[rank].all_reduce(tensors[rank]).wait for rank in (0, 2)])
        assert errors == [None, None]
        assert [t.tolist() for t in tensors] == [[6.0] * 3] * 3


# Workers in processes of their own that come to an end.

Act = Callable[[SharedMemoryCommunicator, torch.Tensor], None]


def _be_rank(rank: int, sizes: Sequence[int], store: Path, pipe: Connection, act: Act, timeout_s: float) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    os.environ.update(RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=sum(sizes), timeout=limit)
    communicator = join(sizes, timeout_s)
    tensor = communicator.empty(PIECES, torch.float32, CPU).fill_(1)
    communicator.all_reduce(tensor).wait()
    started = monotonic()
    try:
        act(communicator, tensor)
        pipe.send((None, "", monotonic() - started))
    except PacelineError as error:
        pipe.send((type(error), str(error), monotonic() - started))
    pipe.recv()  # until all others have had their say: what they notice shall not be our end
    os._exit(0)


@contextmanager
def processes(sizes: Sequence[int], folder: Path, act: Act, timeout_s: float = 60.0) -> Iterator[list[Any]]:
    """A process for each worker, and our ends of the pipes to them. They have exchanged once."""
    context = multiprocessing.get_context("fork")
    started = []
    for rank in range(sum(sizes)):
        here, there = context.Pipe()
        args = (rank, sizes, folder / "store", there, act, timeout_s)
        process = context.Process(target=_be_rank, args=args, daemon=True)
        process.start()
        there.close()
        started.append((process, here))
    try:
        yield [pipe for _, pipe in started]
    finally:
        for process, pipe in started:
            process.kill()
            process.join()
            process.close()
            pipe.close()


def outcomes(pipes: list[Connection], ranks: set[int]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    deadline = monotonic() + 60
    while missing := {pipes[rank]: rank for rank in ranks - set(found)}:
        ready = wait(list(missing), timeout=deadline - monotonic())
        assert ready, f"ranks {sorted(missing.values())} hang"
        found |= {missing[pipe]: pipe.recv() for pipe in ready}
    return found


@pytest.mark.parametrize("victim", range(4))
def test_a_killed_worker_is_an_error_on_all_hosts_at_once(victim: int, tmp_path: Path) -> None:
    def act(communicator: SharedMemoryCommunicator, tensor: torch.Tensor) -> None:
        if communicator.world.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        communicator.all_reduce(tensor).wait()

    with processes([2, 2], tmp_path, act) as pipes:
        for kind, text, seconds in outcomes(pipes, set(range(4)) - {victim}).values():
            assert kind is CommunicationError, text
            assert seconds < 10


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_in_the_middle_of_an_exchange_is_an_error_on_all_hosts(victim: int, tmp_path: Path) -> None:
    """The exchange waits for rank 3, or, once its host has called, for the others."""

    def act(communicator: SharedMemoryCommunicator, tensor: torch.Tensor) -> None:
        rank = communicator.world.rank
        if rank == 3:
            sleep(0.5)
        pending = communicator.all_reduce(tensor)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        pending.wait()
        communicator.all_reduce(tensor).wait()  # the first may have been complete

    with processes([2, 2], tmp_path, act) as pipes:
        for kind, text, seconds in outcomes(pipes, set(range(4)) - {victim}).values():
            assert kind is CommunicationError, text
            assert seconds < 10


def test_a_leader_that_stands_still_is_a_time_out_on_all_hosts(tmp_path: Path) -> None:
    def act(communicator: SharedMemoryCommunicator, tensor: torch.Tensor) -> None:
        pending = communicator.all_reduce(tensor)
        if communicator.world.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        pending.wait()
        communicator.all_reduce(tensor).wait()  # the first may have been complete

    with processes([2, 1], tmp_path, act, timeout_s=0.5) as pipes:
        for kind, text, seconds in outcomes(pipes, {1, 2}).values():
            assert kind is CommunicationTimeout, text
            assert "rank 0" in text or "ranks [0" in text
            assert seconds < 15


def test_a_leader_that_closes_with_an_exchange_on_the_network_gives_it_up(tmp_path: Path) -> None:
    """Its close() does not wait for the other host, whose workers learn of it at once."""

    def act(communicator: SharedMemoryCommunicator, tensor: torch.Tensor) -> None:
        rank = communicator.world.rank
        if rank == 3:
            sleep(1)
        pending = communicator.all_reduce(tensor)
        bridge = communicator._bridge
        if rank == 0:
            wait_until(lambda: len(bridge._sent) == 3)  # all pieces
            started = monotonic()
            communicator.close()
            assert monotonic() - started < 5
        else:
            pending.wait()

    with processes([2, 2], tmp_path, act) as pipes:
        found = outcomes(pipes, set(range(4)))
        assert found.pop(0)[0] is None
        for kind, text, seconds in found.values():
            assert kind is CommunicationError, text
            assert seconds < 10


# What it holds, and when it is chosen.


def memory_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:paceline")


def traces() -> tuple[int, int, int]:
    """Maps, files and threads."""
    return memory_maps(), len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def close_in_every_state(sizes: list[int]) -> list[tuple[int, int, int]]:
    """What is held after each way to close, once everything was loaded."""
    found = []
    for state in ("warm up", "new", "idle", "waiting for the host", "on the network", "failed"):
        communicator = join(sizes, timeout_s=0.3 if state == "failed" else 20.0)
        tensor = communicator.empty(PIECES, torch.float32, CPU).fill_(1)
        rank = communicator.world.rank
        if state in ("warm up", "idle"):
            communicator.all_reduce(tensor).wait()
        if (state == "waiting for the host" and rank == 0) or (state == "on the network" and rank < 2):
            communicator.all_reduce(tensor)
        if state == "failed" and rank != 3:
            with pytest.raises(CommunicationError):
                communicator.all_reduce(tensor).wait()
        torch.distributed.barrier()  # nobody closes before the others have begun
        if rank == 3 and state not in ("warm up", "idle"):
            sleep(0.4)
        started = monotonic()
        communicator.close()
        assert monotonic() - started < 5
        del communicator, tensor
        gc.collect()
        torch.distributed.barrier()  # who is in the middle of closing holds what its peer looks at
        found.append(traces())
    return found


def test_nothing_is_held_after_closing_in_any_state(pool: WorkerPool) -> None:
    for before, *found in pool.run(close_in_every_state, 4, [2, 2]):
        for after in found:  # a file that was open before may have been closed since
            assert all(now <= then for now, then in zip(after, before, strict=True))
        assert before[0] == 0


def test_the_leaders_threads_end_with_the_communicator() -> None:
    with on_hosts([2, 1]) as workers:
        assert sum(t.name == "paceline bridge" for t in threading.enumerate()) == 2
        workers[0].close()
        workers[0].close()
        assert sum(t.name == "paceline bridge" for t in threading.enumerate()) == 1
        with pytest.raises(MisuseError, match="the communicator is closed and accepts no exchange"):
            workers[0].empty(1, torch.float32, CPU)
    assert not any(t.name == "paceline bridge" for t in threading.enumerate())


def placements(*places: tuple[int, int, str]) -> list[dict[str, Any]]:
    return [placement(World(0, 1, local_rank, local_size, host)) for local_rank, local_size, host in places]


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        (placements((0, 2, "a"), (1, 2, "a")), [range(2)]),
        (placements((0, 2, "a"), (1, 2, "a"), (0, 1, "b")), [range(2), range(2, 3)]),
        # Two containers of one machine may have the same name.
        (placements((0, 1, "a"), (0, 2, "a"), (1, 2, "a")), [range(1), range(1, 3)]),
    ],
)
def test_hosts_are_found_from_placements(offers: list[Any], expected: list[range]) -> None:
    assert find_hosts(offers) == expected


@pytest.mark.parametrize(
    ("offers", "message"),
    [
        (placements((0, 1, "a"), (0, 1, "b")), "each of the 2 hosts has one worker"),
        (
            placements((0, 2, "a"), (0, 2, "b"), (1, 2, "a"), (1, 2, "b")),
            r"ranks \[0, 1\] are not the workers of one host: .* \[0, 0\] of \[2, 2\]",
        ),
        (placements((0, 2, "a"), (1, 2, "b")), "on 2 hosts"),
        (placements((0, 3, "a"), (1, 3, "a")), r"ranks \[0, 1\] are not the workers .* \[0, 1\] of \[3, 3\]"),
        (placements((0, 1, "a"), (1, 2, "b")), r"ranks \[1\] are not the workers .* local ranks are \[1\] of \[2\]"),
        (placements((0, 2, "a"), (1, 3, "a")), r"of \[2, 3\]"),
    ],
)
def test_placements_that_contradict_each_other_are_named(offers: list[Any], message: str) -> None:
    with pytest.raises(SharedMemoryUnavailable, match=message):
        find_hosts(offers)


def what_is_chosen(worlds: list[World], obstacle_on: int | None, backend: str | None) -> tuple[str, list[str]]:
    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # A worker of the pool may still end what an earlier test began.
            if record.getMessage().startswith("workers exchange"):
                texts.append(record.getMessage())

    logger, keep = logging.getLogger("paceline"), Keep()
    logger.addHandler(keep)
    level = logger.level
    logger.setLevel(logging.INFO)
    rank = int(os.environ["RANK"])
    create = os.memfd_create
    try:
        if rank == obstacle_on:

            def fail(_: str) -> int:
                raise OSError("no memory")

            segment.os.memfd_create = fail
        communicator = connect(worlds[rank], backend)
        tensor = communicator.empty(5, torch.float32, CPU).fill_(1)
        communicator.all_reduce(tensor).wait()
        assert tensor.tolist() == [len(worlds)] * 5
        communicator.close()
        return type(communicator).__name__, texts
    finally:
        segment.os.memfd_create = create
        logger.removeHandler(keep)
        logger.setLevel(level)


def test_leaders_that_cannot_connect_are_an_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CommunicationError("no route")

    monkeypatch.setattr(bridge_module, "ProcessGroupCommunicator", fail)
    before = threading.active_count()
    first, second, third = join_all([2, 1])
    assert [str(first), str(third)] == ["no route"] * 2
    with pytest.raises(CommunicationError, match=r"rank 0 stopped after an error before .*: no route"):
        second.all_reduce(torch.zeros(1)).wait()
    second.close()
    assert threading.active_count() == before


SHARED, FLAT = "SharedMemoryCommunicator", "ProcessGroupCommunicator"
OVER_GLOO = "workers exchange over gloo, not through shared memory: "


@pytest.mark.parametrize(
    ("worlds", "obstacle_on", "backend", "kind", "message"),
    [
        (worlds_of([2, 1]), None, None, SHARED, "workers exchange through shared memory inside each of 2 "),
        (
            worlds_of([2, 1], "same"),
            None,
            None,
            SHARED,
            "workers exchange through shared memory inside each of 2 hosts",
        ),
        (worlds_of([3]), None, None, SHARED, ""),
        (worlds_of([1, 1, 1]), None, None, FLAT, OVER_GLOO + "each of the 3 hosts has one worker"),
        (
            [World(rank, 3, rank, 3, device=torch.device("meta" if rank else "cpu")) for rank in range(3)],
            None,
            None,
            FLAT,
            OVER_GLOO + "rank 1: its tensors are on meta, not on the CPU; rank 2: its tensors are on meta",
        ),
        (worlds_of([2, 1]), None, "gloo", FLAT, ""),
        (worlds_of([2, 1]), 0, None, FLAT, OVER_GLOO + "rank 0: no memory"),
        (worlds_of([2, 1]), 2, None, FLAT, OVER_GLOO + "rank 2: no memory"),
        (
            [World(0, 3, 0, 2, "a"), World(1, 3, 0, 1, "b"), World(2, 3, 1, 2, "a")],
            None,
            None,
            FLAT,
            OVER_GLOO + "ranks [0, 1] are not the workers of one host: their local ranks are [0, 0] of [2, 1], on 2",
        ),
    ],
)
def test_all_workers_choose_the_same_communicator(
    worlds: list[World], obstacle_on: int | None, backend: str | None, kind: str, message: str, pool: WorkerPool
) -> None:
    for found, texts in pool.run(what_is_chosen, 3, worlds, obstacle_on, backend):
        assert found == kind
        assert any(text.startswith(message) for text in texts) if message else not texts
