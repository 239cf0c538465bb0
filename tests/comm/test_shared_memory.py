"""Workers that share memory: sums, order, and errors instead of hangs, in processes and in threads of one process."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import random
import re
import signal
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import permutations
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from gatherings import CPU, buffers, join_all, sharing, sum_in_rank_order, terms, together
from waiting import wait_until
from worker_pool import WorkerPool

from paceline.comm import connect
from paceline.comm.base import Pending
from paceline.comm.folder_store import FolderStore
from paceline.comm.rendezvous import Rendezvous, RendezvousPoint
from paceline.comm.shared_memory import buffers as shared_buffers
from paceline.comm.shared_memory import peers, segment
from paceline.comm.shared_memory.buffers import BLOCK_BYTES, SMALL_BYTES
from paceline.comm.shared_memory.communicator import SCRATCH_BYTES, SharedMemoryCommunicator, missing_shared_memory
from paceline.comm.shared_memory.peers import SharedMemoryUnavailable, placement
from paceline.core import timing
from paceline.core.errors import CommunicationError, CommunicationTimeout, MisuseError
from paceline.core.world import World

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
# In float32: the last small buffer, the first large one, and one of several blocks with an odd rest.
SMALL, LARGE, BLOCKS = SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, 2 * BLOCK_BYTES // 4 + 3


# Sums.


def join() -> SharedMemoryCommunicator:
    communicator = connect(World.from_environment(), timeout_s=20.0)
    assert isinstance(communicator, SharedMemoryCommunicator)
    return communicator


def sum_everything(sizes: list[int]) -> list[torch.Tensor]:
    communicator = join()
    rank, size = communicator.world.rank, communicator.world.size
    results = []
    for numel in sizes:
        for dtype in DTYPES:
            tensor = communicator.empty(numel, dtype, CPU)
            assert tensor.data_ptr() % 4096 == 0
            tensor.copy_(terms(size, numel)[rank])
            communicator.all_reduce(tensor).wait()
            results.append(tensor.clone())
    communicator.close()
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_the_sum_is_that_of_a_loop_in_rank_order_bit_for_bit(size: int, pool: WorkerPool) -> None:
    some = list(terms(size, 1000))
    assert size == 2 or not torch.equal(sum_in_rank_order(some), sum_in_rank_order(some[::-1]))
    sizes = [1, 7, SMALL, LARGE, 50_001, BLOCKS]
    expected = [sum_in_rank_order(list(terms(size, numel).to(dtype))) for numel in sizes for dtype in DTYPES]
    for results in pool.run(sum_everything, size, sizes):
        for result, want in zip(results, expected, strict=True):
            assert torch.equal(result, want), (want.dtype, want.shape)


@pytest.mark.parametrize("numel", [5, BLOCKS])
def test_broadcast_gives_all_the_part_of_the_source(numel: int) -> None:
    with sharing(3) as workers:
        for source in range(3):
            tensors = buffers(workers, numel)
            pending = [w.broadcast(t, source) for w, t in zip(workers, tensors, strict=True)]
            for each in reversed(pending):
                each.wait()
            assert all((t == source + 1).all() for t in tensors)


def test_a_tensor_over_the_whole_buffer_is_the_buffer_and_a_part_of_it_is_not() -> None:
    with sharing(2) as workers:
        tensors = buffers(workers, 12)
        together([w.all_reduce(t.view(3, 4)).wait for w, t in zip(workers, tensors, strict=True)])
        together([lambda w=w, t=t: w.all_reduce(t[:6]).wait() for w, t in zip(workers, tensors, strict=True)])
        assert [t.tolist() for t in tensors] == [[6.0] * 6 + [3.0] * 6] * 2


@pytest.mark.parametrize("numel", [3, BLOCKS])
def test_who_has_started_but_is_busy_holds_up_nobody(numel: int) -> None:
    with sharing(3) as workers:
        tensors = buffers(workers, numel)
        pending = [w.all_reduce(t) for w, t in zip(workers, tensors, strict=True)]
        pending[1].wait()
        assert (tensors[1] == 6).all()
        tensors[1].fill_(100)  # and it goes on
        pending[0].wait()
        pending[2].wait()
        pending[2].wait()
        assert [t[0].item() for t in tensors] == [6, 100, 6]


def start_many_then_wait_backwards() -> list[float]:
    communicator = join()
    rank = communicator.world.rank
    shared = [communicator.empty(numel, torch.float32, CPU) for numel in [10, LARGE, BLOCKS] * 5]
    private = [torch.empty(numel) for numel in [10, LARGE, 7] * 5]
    tensors = [t for pair in zip(shared, private, strict=True) for t in pair]
    for round_number in range(3):
        for i, tensor in enumerate(tensors):
            tensor.fill_(round_number + 10 * i + 1000 * rank)
        pending = [
            communicator.broadcast(t, 1) if i % 5 == 0 else communicator.all_reduce(t) for i, t in enumerate(tensors)
        ]
        # Waits need no common order, only calls do.
        for each in reversed(pending) if rank else pending:
            each.wait()
    assert all((t == t[0]).all() for t in tensors)
    communicator.close()
    return [t[0].item() for t in tensors]


def test_many_exchanges_are_under_way_at_once_with_and_without_copies(pool: WorkerPool) -> None:
    sums = [2 * (2 + 10 * i) + 1000.0 for i in range(30)]
    for result in pool.run(start_many_then_wait_backwards, 2):
        assert result == [2 + 10 * i + 1000.0 if i % 5 == 0 else sums[i] for i in range(30)]


def many_with_delays(count: int) -> list[int]:
    communicator = join()
    rank, size = communicator.world.rank, communicator.world.size
    pauses = random.Random(rank)
    tensors = [communicator.empty(numel, torch.float64, CPU) for numel in (3, 2 * LARGE)]
    wrong: list[int] = []
    for i in range(count):
        tensor = tensors[i % 10 == 0]
        tensor.fill_(i * (rank + 1))
        pending = communicator.all_reduce(tensor)
        if pauses.random() < 0.05:
            sleep(pauses.random() * 1e-3)
        pending.wait()
        if pauses.random() < 0.05:
            sleep(pauses.random() * 1e-3)
        if not (tensor == i * size * (size + 1) / 2).all():
            wrong.append(i)
    communicator.close()
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_a_fast_worker_does_not_overwrite_what_a_slow_one_still_reads(size: int, pool: WorkerPool) -> None:
    assert pool.run(many_with_delays, size, 2000) == [[]] * size


def test_a_sleeping_worker_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With naps of a minute, one wake-up that got lost would be noticed."""
    monkeypatch.setattr(peers, "NAP_S", 60.0)
    monkeypatch.setattr(peers, "SPIN_S", 0.0)
    with sharing(3) as workers:

        def run(worker: SharedMemoryCommunicator) -> float:
            small, large = (worker.empty(numel, torch.float32, CPU).fill_(1) for numel in (1, LARGE))
            for _ in range(200):
                worker.all_reduce(small.fill_(1)).wait()
                worker.broadcast(large).wait()
            return small.item()

        started = monotonic()
        assert together([lambda w=w: run(w) for w in workers]) == [3.0] * 3
        assert monotonic() - started < 50


def test_a_call_between_looking_and_falling_asleep_is_not_slept_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "NAP_S", 60.0)
    with sharing(2) as workers:
        tensors = buffers(workers, 1)
        # The clock is read twice after looking in vain, before falling asleep.
        events = iter([lambda: None, lambda: workers[1].all_reduce(tensors[1])])

        def clock() -> float:
            next(events)()
            return monotonic()

        monkeypatch.setattr(timing, "monotonic", clock)
        started = monotonic()
        workers[0].all_reduce(tensors[0]).wait()
        assert next(events, None) is None
        assert monotonic() - started < 30


def test_time_in_which_all_were_suspended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with sharing(2, timeout_s=30.0) as workers:
        tensors = buffers(workers, 1)
        num_hours = 0

        def clock() -> float:
            nonlocal num_hours
            num_hours += 1
            if num_hours == 10:
                workers[1].all_reduce(tensors[1])
            return 3600.0 * num_hours

        monkeypatch.setattr(timing, "monotonic", clock)
        workers[0].all_reduce(tensors[0]).wait()
        assert num_hours == 10


# What goes wrong.


@pytest.mark.parametrize("numel", [3, BLOCKS])
def test_a_time_out_names_who_is_missing(numel: int) -> None:
    with sharing(4, timeout_s=0.1) as workers:
        tensors = buffers(workers, numel)
        pending = {rank: workers[rank].all_reduce(tensors[rank]) for rank in (0, 2)}
        for rank, each in pending.items():
            with pytest.raises(CommunicationTimeout) as caught:
                each.wait()
            assert str(caught.value) == (
                f"rank {rank} waited timeout_s=0.1 s in all_reduce of {numel} elements of torch.float32 "
                "(buffer 0 at offset 36864): ranks [1, 3] did not call it"
            )


def test_after_an_error_nothing_is_exchanged_any_more() -> None:
    with sharing(2, timeout_s=0.1) as workers:
        tensors = buffers(workers, 3)
        pending = workers[0].all_reduce(tensors[0])
        with pytest.raises(CommunicationTimeout):
            pending.wait()
        calls = (
            pending.wait,
            lambda: workers[0].all_reduce(tensors[0]),
            lambda: workers[0].broadcast(torch.zeros(1)),
            lambda: workers[0].empty(1, torch.float32, CPU),
        )
        for call in calls:
            with pytest.raises(CommunicationError, match=r"no exchange is possible after this error: rank 0 waited "):
                call()
        workers[1].all_reduce(tensors[1]).wait()  # rank 0 had started this one
        with pytest.raises(CommunicationError, match=r"rank 0 waited timeout_s=0.1 s in all_reduce of 3 elements"):
            workers[1].all_reduce(tensors[1]).wait()


@pytest.mark.parametrize("numel", [3, BLOCKS])
def test_a_worker_that_closes_is_an_error_and_no_wait(numel: int) -> None:
    with sharing(3, timeout_s=60.0) as workers, ThreadPoolExecutor(1) as threads:
        tensors = buffers(workers, numel)
        waiting = threads.submit(workers[0].all_reduce(tensors[0]).wait)
        workers[2].close()
        pending = workers[1].all_reduce(tensors[1])
        for wait in (lambda: waiting.result(10), pending.wait):
            with pytest.raises(CommunicationError, match=r"rank 2 closed its communicator before all_reduce of "):
                wait()


def test_who_left_is_noticed_while_another_is_late() -> None:
    with sharing(3, timeout_s=60.0) as workers:
        tensors = buffers(workers, 3)
        workers[2].close()
        with pytest.raises(CommunicationError, match="rank 2 closed its communicator before all_reduce of 3 elements"):
            workers[0].all_reduce(tensors[0]).wait()  # rank 1 has not come yet


@pytest.mark.parametrize("numel", [3, BLOCKS])
def test_a_worker_may_close_once_it_has_started(numel: int) -> None:
    with sharing(2) as workers:
        tensors = buffers(workers, numel)
        workers[0].all_reduce(tensors[0])
        workers[0].close()
        workers[1].all_reduce(tensors[1]).wait()
        assert (tensors[1] == 3).all()


class Buffers(NamedTuple):
    """Of one worker."""

    first: torch.Tensor
    second: torch.Tensor
    third: torch.Tensor


CALLS: dict[str, Callable[[SharedMemoryCommunicator, Buffers], Pending]] = {
    "all_reduce of 100 elements of torch.float32 (buffer 0": lambda w, b: w.all_reduce(b.first),
    "all_reduce of 200 elements of torch.float32 (buffer 1": lambda w, b: w.all_reduce(b.second),
    "all_reduce of 99999 elements of torch.int64 (buffer 2": lambda w, b: w.all_reduce(b.third),
    "broadcast from 0 of 100 elements of torch.float32 (buffer 0": lambda w, b: w.broadcast(b.first),
    "broadcast from 1 of 100 elements of torch.float32 (buffer 0": lambda w, b: w.broadcast(b.first, 1),
}


@pytest.mark.parametrize("calls", list(permutations(CALLS, 2)), ids=" and ".join)
def test_another_call_of_a_peer_is_an_error_that_names_both(calls: tuple[str, str]) -> None:
    with sharing(2) as workers:
        kinds = ((100, torch.float32), (200, torch.float32), (99999, torch.int64))
        made = [Buffers(*(w.empty(numel, dtype, CPU).zero_() for numel, dtype in kinds)) for w in workers]
        pending = [CALLS[call](w, b) for call, w, b in zip(calls, workers, made, strict=True)]
        for rank, each in enumerate(pending):
            with pytest.raises(CommunicationError) as caught:
                each.wait()
            text = str(caught.value)
            assert text.startswith(f"exchange 0: rank {rank} calls {calls[rank]} at ")
            assert f", rank {1 - rank} calls {calls[1 - rank]} at " in text
            assert text.endswith(": all workers must make the same calls in the same order")


def test_calls_in_another_order_are_an_error_however_many_are_under_way() -> None:
    with sharing(2) as workers:
        one, other = buffers(workers, 3), buffers(workers, 3)
        order = [(one[0], other[0]), (other[1], one[1])]
        pending = [[w.all_reduce(t) for t in tensors] for w, tensors in zip(workers, order, strict=True)]
        for calls, (mine, theirs) in zip(pending, [(0, 1), (1, 0)], strict=True):
            with pytest.raises(CommunicationError, match=rf"\(buffer {mine} at .*\(buffer {theirs} at .*same order"):
                calls[0].wait()


def test_buffers_made_differently_are_an_error() -> None:
    with sharing(2) as workers:
        tensors = [w.empty(numel, torch.float32, CPU).zero_() for w, numel in zip(workers, (100, 200), strict=True)]
        for pending in [w.all_reduce(t) for w, t in zip(workers, tensors, strict=True)]:
            with pytest.raises(
                CommunicationError, match=r" of [12]00 elements .*, rank [01] calls all_reduce of [12]00 elements"
            ):
                pending.wait()


def test_a_call_with_a_copy_is_another_call() -> None:
    with sharing(2) as workers:
        tensors = buffers(workers, 3)
        pending = workers[0].all_reduce(tensors[0])
        workers[1].all_reduce(torch.zeros(3))
        with pytest.raises(CommunicationError, match=r"rank 1 calls all_reduce \(3 copied\) of 128 .*same order"):
            pending.wait()


def test_a_record_that_was_overwritten_is_not_compared() -> None:
    with sharing(2) as workers:
        one, other = buffers(workers, 3), buffers(workers, 3)
        pending = [w.all_reduce(t) for w, t in zip(workers, one, strict=True)]
        for _ in range(segment.NUM_RECORDS + 1):
            together([w.all_reduce(t).wait for w, t in zip(workers, other, strict=True)])
        for each in pending:
            each.wait()
        assert [t.tolist() for t in one] == [[3.0] * 3] * 2


def test_a_buffer_is_in_one_exchange_at_a_time() -> None:
    with sharing(2) as workers:
        tensors = buffers(workers, 3)
        workers[0].all_reduce(tensors[0])
        with pytest.raises(
            MisuseError, match=r"is called while the buffer is in another exchange: wait\(\) for that one first"
        ):
            workers[0].broadcast(tensors[0])


def test_a_source_outside_the_world_is_an_error() -> None:
    with sharing(2) as workers, pytest.raises(ValueError, match="source=2 is not a rank in a world of 2"):
        workers[0].broadcast(torch.zeros(1), 2)


# Peers in processes of their own that come to an end.


def join_two(rank: int, store: Path, timeout_s: float) -> SharedMemoryCommunicator:
    world = World(rank, 2, rank, 2)
    rendezvous = Rendezvous(world, 60.0, placement(world), RendezvousPoint(FolderStore(store)))
    return SharedMemoryCommunicator(world, timeout_s, rendezvous)


def _be_rank_1(store: Path, act: Callable[[SharedMemoryCommunicator], None]) -> None:
    act(join_two(1, store, 60.0))
    os._exit(0)


@contextmanager
def beside_a_process(
    folder: Path, act: Callable[[SharedMemoryCommunicator], None], timeout_s: float = 60.0
) -> Iterator[tuple[SharedMemoryCommunicator, Any]]:
    """Rank 0 of a world of two, and the process of rank 1, which calls `act` and ends."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_be_rank_1, args=(folder / "store", act), daemon=True)
    process.start()
    communicator = join_two(0, folder / "store", timeout_s)
    try:
        yield communicator, process
    finally:
        communicator.close()
        process.kill()
        process.join()
        process.close()


def reduce_once_and_die(communicator: SharedMemoryCommunicator) -> None:
    communicator.all_reduce(communicator.empty(1, torch.float32, CPU).fill_(2)).wait()
    os._exit(1)


def die_in_the_middle_of_a_block(communicator: SharedMemoryCommunicator) -> None:
    shared_buffers.add_up = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    communicator.all_reduce(communicator.empty(BLOCKS, torch.float32, CPU).fill_(2)).wait()


def stop_in_the_middle_of_a_block(communicator: SharedMemoryCommunicator) -> None:
    shared_buffers.add_up = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    communicator.all_reduce(communicator.empty(BLOCKS, torch.float32, CPU).fill_(2)).wait()


def test_a_dead_peer_is_noticed_at_once(tmp_path: Path) -> None:
    with beside_a_process(tmp_path, reduce_once_and_die) as (communicator, _):
        tensor = communicator.empty(1, torch.float32, CPU).fill_(1)
        communicator.all_reduce(tensor).wait()
        assert tensor.item() == 3
        started = monotonic()
        with pytest.raises(CommunicationError, match="rank 1 died before all_reduce of 1 elements"):
            communicator.all_reduce(tensor).wait()
        assert monotonic() - started < 5


def test_a_peer_that_dies_with_a_block_half_done_is_noticed(tmp_path: Path) -> None:
    with beside_a_process(tmp_path, die_in_the_middle_of_a_block) as (communicator, process):
        tensor = communicator.empty(BLOCKS, torch.float32, CPU).fill_(1)
        pending = communicator.all_reduce(tensor)
        process.join(20)
        with pytest.raises(CommunicationError, match="rank 1 died before all_reduce of"):
            pending.wait()


def test_a_peer_that_stops_with_a_block_half_done_is_a_time_out(tmp_path: Path) -> None:
    with beside_a_process(tmp_path, stop_in_the_middle_of_a_block, timeout_s=0.2) as (communicator, process):
        tensor = communicator.empty(BLOCKS, torch.float32, CPU).fill_(1)
        pending = communicator.all_reduce(tensor)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(CommunicationTimeout, match=r"ranks \[1\] did not finish their blocks"):
            pending.wait()


# What it holds, and when it cannot be had.


def memory_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:paceline")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_held_after_closing() -> None:
    gc.collect()  # errors that earlier tests caught hold their frames, and those their communicators
    before, files = memory_maps(), open_files()
    names = set(Path("/dev/shm").iterdir())
    for _ in range(50):
        with sharing(2) as workers:
            tensors = buffers(workers, 100) + buffers(workers, LARGE)
            for pending in [w.all_reduce(t) for w, t in zip(workers * 2, tensors, strict=True)]:
                pending.wait()
            assert memory_maps() > before
            assert set(Path("/dev/shm").iterdir()) == names
            del tensors, pending
    assert open_files() == files
    del workers
    assert memory_maps() == before


def test_a_closed_communicator_takes_no_calls_and_its_tensors_live_on() -> None:
    with sharing(2) as workers:
        tensor = buffers(workers, LARGE)[0]
        workers[0].close()
        workers[0].close()
        calls = (
            lambda: workers[0].all_reduce(tensor),
            lambda: workers[0].broadcast(tensor),
            lambda: workers[0].empty(1, torch.float32, CPU),
        )
        for call in calls:
            with pytest.raises(MisuseError, match="the communicator is closed and accepts no exchange"):
                call()
    assert tensor.sum().item() == LARGE


def test_other_devices_and_empty_tensors_are_ordinary_memory() -> None:
    with sharing(2) as workers:
        assert workers[0].empty(0, torch.float32, CPU).shape == (0,)
        assert workers[0].empty(3, torch.float32, torch.device("meta")).device.type == "meta"


def fail_allocation(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    left = [times]
    allocate = os.posix_fallocate

    def fail(fd: int, offset: int, length: int) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, length)

    monkeypatch.setattr(segment.os, "posix_fallocate", fail)


def test_if_one_worker_cannot_share_memory_all_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_allocation(monkeypatch, 1)
    files = open_files()
    errors = join_all([3])
    assert [type(error) for error in errors] == [SharedMemoryUnavailable] * 3
    [text] = set(map(str, errors))
    assert re.fullmatch(r"rank \d: \[Errno 28\] No space left on device", text)
    del errors

    def is_released() -> bool:
        gc.collect()  # the errors' frames hold what was opened, until the threads have ended
        return open_files() <= files  # errors of earlier tests may have held some too

    wait_until(is_released)


def test_memory_that_cannot_be_had_is_an_error_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    with sharing(2) as workers:
        with pytest.raises(CommunicationError, match=r"for 1,000,000,000,000 elements of torch\.float64: .* exceed"):
            workers[0].empty(10**12, torch.float64, CPU)
        fail_allocation(monkeypatch, 1)
        with pytest.raises(CommunicationError, match=r"for 10 elements of torch\.float32: .*No space left on device"):
            workers[0].empty(10, torch.float32, CPU)
        tensors = buffers(workers, 10)  # a failed attempt leaves no gap
        for pending in [w.all_reduce(t) for w, t in zip(workers, tensors, strict=True)]:
            pending.wait()
        assert tensors[0].tolist() == [3.0] * 10


@pytest.mark.parametrize("advice", [segment._MADV_COLLAPSE, 9999], ids=["to be had", "not to be had"])
def test_large_memory_begins_where_huge_pages_do_for_every_worker(advice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_MADV_COLLAPSE", advice)
    own = segment.OwnSegment()
    try:
        peer = segment.Segment.open_peer(os.getpid(), own.fd, own.token)
        own.allocate(100)
        numel = segment.HUGE_PAGE_BYTES // 4 + 1
        offset = own.allocate(4 * numel)
        assert own.address(offset) % segment.HUGE_PAGE_BYTES == peer.address(offset) % segment.HUGE_PAGE_BYTES == 0
        own.tensor(numel, torch.float32, offset).fill_(3)
        assert (peer.tensor(numel, torch.float32, offset) == 3).all()
        small = own.allocate(100)
        assert small == offset + 2 * segment.HUGE_PAGE_BYTES
        assert not peer.tensor(25, torch.float32, small).any()
    finally:
        own.close()


def test_memory_of_another_process_is_not_taken_for_the_peers() -> None:
    own = segment.OwnSegment()
    other = os.memfd_create("other")
    try:
        for fd, token in ((own.fd, own.token + 1), (other, 0)):
            with pytest.raises(OSError, match=f"/proc/{os.getpid()}/fd/{fd} is not the peer's segment"):
                segment.Segment.open_peer(os.getpid(), fd, token)
        segment.Segment.open_peer(os.getpid(), own.fd, own.token)
    finally:
        own.close()
        os.close(other)


def test_where_it_cannot_be_used_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0, 2, 0, 2)
    assert missing_shared_memory(world) is None
    on_gpu = World(0, 2, 0, 2, device=torch.device("cuda", 0))
    assert missing_shared_memory(on_gpu) == "its tensors are on cuda:0, not on the CPU"
    monkeypatch.setattr(segment.platform, "machine", lambda: "aarch64")
    assert missing_shared_memory(world) == "shared memory relies on the memory order of x86_64, not aarch64"
    for error in join_all([2]):
        assert "rank 0: shared memory relies on the memory order of x86_64" in str(error)
    monkeypatch.setattr(segment.sys, "platform", "darwin")
    assert missing_shared_memory(world) == "shared memory requires Linux, not darwin"


# Tensors that `empty` did not allocate.

NUMELS = [1, 127, 129, 5000, 9000, SCRATCH_BYTES[-1] // 4, 2 * SCRATCH_BYTES[-1] // 4 + 3]
COPIED_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


def exchange_copies() -> tuple[Any, ...]:
    me = psutil.Process()
    before = set(me.net_connections("all"))
    with closing(join()) as communicator:
        rank, size = communicator.world.rank, communicator.world.size
        total = size * (size + 1) // 2
        for dtype in COPIED_DTYPES:
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
        return tuple(set(me.net_connections("all")) - before)


@pytest.mark.parametrize("size", [2, 3])
def test_any_tensor_is_exchanged_and_nothing_is_opened(size: int, pool: WorkerPool) -> None:
    assert pool.run(exchange_copies, size) == [()] * size


def call_all(worker: SharedMemoryCommunicator, tensors: list[torch.Tensor]) -> None:
    pending = [worker.all_reduce(t) if i % 2 else worker.broadcast(t) for i, t in enumerate(tensors)]
    for each in reversed(pending) if worker.world.rank else pending:
        each.wait()
        each.wait()


def test_a_copied_tensor_is_not_kept_after_its_exchange() -> None:
    with sharing(2) as workers:
        arrays = [np.zeros(SCRATCH_BYTES[-1]) for _ in workers]
        kept = [weakref.ref(array) for array in arrays]
        together(
            [lambda w=w, a=a: w.broadcast(torch.from_numpy(a)).wait() for w, a in zip(workers, arrays, strict=True)]
        )
        del arrays
        gc.collect()
        assert [each() for each in kept] == [None, None]


def test_copies_are_matched_by_the_order_of_calls() -> None:
    with sharing(2) as workers:
        by_rank = [[torch.full((1 + 1000 * (i % 3),), float(i)) for i in range(20)] for _ in workers]
        assert together([lambda w=w: call_all(w, by_rank[w.world.rank]) for w in workers]) == [None, None]
        expected = [2.0 * i if i % 2 else float(i) for i in range(20)]
        assert [[t[-1].item() for t in tensors] for tensors in by_rank] == [expected] * 2
