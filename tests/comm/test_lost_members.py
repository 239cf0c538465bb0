"""A member dies in a call, or another thread aborts it: for every communicator and every call, an error and no hang."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gatherings import CPU, buffers, on_hosts, over_gloo, sharing, together, worlds_of
from waiting import wait_until

from paceline.comm.base import Communicator, Ownership
from paceline.comm.folder_store import FolderStore
from paceline.comm.host_link import HostLink
from paceline.comm.process_group import ProcessGroupCommunicator, _gloo_group
from paceline.comm.rendezvous import Rendezvous, RendezvousPoint
from paceline.comm.shared_memory.communicator import SharedMemoryCommunicator
from paceline.comm.shared_memory.peers import placement
from paceline.comm.single import SingleCommunicator
from paceline.core.errors import CommunicationError
from paceline.core.world import World

SMALL, LARGE = 1, 900_001
LIMIT_S = 60.0  # of what takes milliseconds on an idle machine; timeouts are longer
TIMEOUT_S = 600.0


def all_reduce(communicator: Communicator, numel: int) -> None:
    communicator.all_reduce(communicator.empty(numel, torch.float32, CPU)).wait()


def all_reduce_copy(communicator: Communicator, numel: int) -> None:
    communicator.all_reduce(torch.ones(numel)).wait()


def broadcast(communicator: Communicator, numel: int) -> None:
    communicator.broadcast(communicator.empty(numel, torch.float32, CPU), 1).wait()


def reduce(communicator: Communicator, numel: int) -> None:
    [buffer] = communicator.owned(Ownership([numel], [(1,)], torch.float32, CPU, 1))
    buffer.reduce().wait()


def deliver(communicator: Communicator, numel: int) -> None:
    [buffer] = communicator.owned(Ownership([numel], [(1,)], torch.float32, CPU, 1))
    buffer.deliver(torch.float32, torch.Tensor.sum).wait()


CALLS = {
    "all_reduce small": partial(all_reduce, numel=SMALL),
    "all_reduce large": partial(all_reduce, numel=LARGE),
    "all_reduce of another tensor": partial(all_reduce_copy, numel=LARGE),
    "reduce small": partial(reduce, numel=SMALL),
    "reduce large": partial(reduce, numel=LARGE),
    "deliver": partial(deliver, numel=LARGE),
    "broadcast small": partial(broadcast, numel=SMALL),
    "broadcast large": partial(broadcast, numel=LARGE),
}
Call = Callable[[Communicator], None]
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


# In processes of their own


def connect(kind: str, world: World, store: Path) -> Communicator:
    at = RendezvousPoint(FolderStore(store))
    if kind == "gloo":
        return ProcessGroupCommunicator(world, "gloo", TIMEOUT_S, Rendezvous(world, LIMIT_S, at=at))
    return SharedMemoryCommunicator(world, TIMEOUT_S, Rendezvous(world, LIMIT_S, placement(world), at))


def be_worker(kind: str, world: World, store: Path, call: Call, dies: str, pipe: Connection) -> None:
    """Exchange once, then call until it fails. dies: where this worker does, if at all.

    Gloo does not notice every loss: an agent does, and another thread aborts the exchange.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    communicator = connect(kind, world, store)
    all_reduce(communicator, 3)
    if kind == "gloo":
        threading.Thread(target=lambda: (pipe.recv(), communicator.abort()), daemon=True).start()
    if dies == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    elif dies == "between":
        communicator.all_reduce(torch.ones(LARGE))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if dies == "others between":
            communicator.all_reduce(torch.ones(LARGE)).wait()
        call(communicator)
        call(communicator)  # the first may be complete, as a broadcast is for its source
        pipe.send("nothing was raised")
    except CommunicationError as error:
        pipe.send((type(error).__name__, str(error)))
    signal.pause()  # until all have reported: nobody shall notice another survivor's end


def outcomes(kind: str, sizes: list[int], store: Path, call: Call, victim: int, moment: str) -> dict[int, Any]:
    """What each survivor reports."""
    context = multiprocessing.get_context("fork")
    started = {}
    for rank, world in enumerate(worlds_of(sizes)):
        here, there = context.Pipe()
        dies = moment if rank == victim else "others between" if moment == "between" else ""
        process = context.Process(target=be_worker, args=(kind, world, store, call, dies, there), daemon=True)
        process.start()
        there.close()
        started[rank] = process, here
    found: dict[int, Any] = {}
    try:
        started[victim][0].join(LIMIT_S)
        if kind == "gloo":
            for rank in {*started} - {victim}:
                started[rank][1].send("a member was lost")
        deadline_s = monotonic() + LIMIT_S
        while missing := {pipe: rank for rank, (_, pipe) in started.items() if rank not in {*found, victim}}:
            ready = wait(list(missing), timeout=deadline_s - monotonic())
            assert ready, f"ranks {sorted(missing.values())} hang"
            found |= {missing[pipe]: pipe.recv() for pipe in ready}  # type: ignore[index,union-attr]
        return found
    finally:
        for process, pipe in started.values():
            process.kill()
            process.join()
            process.close()
            pipe.close()


@pytest.mark.parametrize(("kind", "sizes"), [("one host", [3]), ("hosts", [2, 1]), ("gloo", [3])])
@pytest.mark.parametrize(
    ("name", "victim", "moment"),
    [(name, number % 3, "before") for number, name in enumerate(CALLS)] + [("all_reduce large", 0, "between")],
)
def test_a_member_dies(kind: str, sizes: list[int], name: str, victim: int, moment: str, tmp_path: Path) -> None:
    found = outcomes(kind, sizes, tmp_path / "store", CALLS[name], victim, moment)
    assert {rank: error for rank, (error, _) in found.items()} == dict.fromkeys(
        {0, 1, 2} - {victim}, "CommunicationError"
    ), found


# Aborted by another thread. Workers are threads.


@pytest.fixture
def collected() -> Iterator[None]:
    """Errors refer to the groups that raised them, whose ports are open as long as they exist."""
    yield
    gc.collect()


GATHERINGS = {"one host": partial(sharing, 3), "hosts": partial(on_hosts, [2, 1]), "gloo": partial(over_gloo, 3)}
every_kind = pytest.mark.parametrize("gathering", GATHERINGS.values(), ids=GATHERINGS)


@every_kind
@every_call
@pytest.mark.parametrize("caller", [0, 2])
@pytest.mark.usefixtures("collected")
def test_abort_wakes_a_blocked_call(gathering: Any, call: Call, caller: int) -> None:
    """Rank `caller` waits for the others, which do not come; afterwards it can make no call any more."""
    with gathering(timeout_s=TIMEOUT_S) as workers:
        buffers(workers, 3)
        waits, outcome = threading.Event(), []

        def run() -> None:
            waits.set()
            outcome.extend(together([lambda: (call(workers[caller]), call(workers[caller]))]))

        thread = threading.Thread(target=run)
        thread.start()
        waits.wait()
        began_s = monotonic()
        workers[caller].abort()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        [error] = outcome
        assert type(error) is CommunicationError, error
        for later in CALLS.values():
            with pytest.raises(CommunicationError) as caught:
                later(workers[caller])
            assert caught.type is CommunicationError
        assert monotonic() - began_s < LIMIT_S
        workers[caller].abort()  # again is a no-op


@every_kind
@pytest.mark.usefixtures("collected")
def test_abort_fails_peers_that_wait_too(gathering: Any) -> None:
    with gathering(timeout_s=TIMEOUT_S) as workers:
        outcome: list[Any] = []
        thread = threading.Thread(
            target=lambda: outcome.extend(together([lambda w=w: all_reduce(w, LARGE) for w in workers[1:]]))
        )
        thread.start()
        workers[0].abort()
        thread.join(LIMIT_S)
        assert [type(error) for error in outcome] == [CommunicationError] * 2, outcome


@every_kind
def test_abort_after_close_is_a_no_op(gathering: Any) -> None:
    with gathering() as workers:
        for worker in workers:
            worker.close()
            worker.abort()


def test_a_single_worker_has_nobody_to_lose() -> None:
    alone = SingleCommunicator(World())
    alone.abort()
    for call in CALLS.values():
        call(alone) if "all_reduce" in str(call) else None  # the others are to and from rank 1
    alone.close()


# A member is lost while the others connect: the new generation ends this attempt.


class Ending:
    """A meeting point whose generation ends when told."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        self.store = dist.HashStore()

    def check(self) -> None:
        if self.has_ended.is_set():
            raise CommunicationError("generation 1 ended while its members connected")


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("kind", ["gloo", "link"])
def test_a_member_is_lost_after_it_was_found(kind: str) -> None:
    ending = Ending()
    at, (world, other) = RendezvousPoint(ending.store, ending.check), worlds_of([2])
    outcome: list[Any] = []

    def connect_both() -> None:
        def first() -> Any:
            if kind == "gloo":
                return ProcessGroupCommunicator(world, "gloo", TIMEOUT_S, Rendezvous(world, LIMIT_S, at=at))
            return HostLink(world, TIMEOUT_S, TIMEOUT_S, at)

        outcome.extend(together([first, lambda: Rendezvous(other, LIMIT_S, at=at)]))

    thread = threading.Thread(target=connect_both)
    thread.start()
    wait_until(lambda: ending.store.num_keys() >= 4)  # both have met; the other one goes no further
    ending.has_ended.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert isinstance(outcome[0], CommunicationError), outcome
    assert "generation 1 ended" in str(outcome[0])
    if kind == "gloo":  # let the attempt that was given up succeed, and so end, in its thread
        _gloo_group(outcome[1].store, other, timedelta(seconds=LIMIT_S))
