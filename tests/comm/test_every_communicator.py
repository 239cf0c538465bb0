"""What holds for every communicator: a process group, and shared memory on one host or several. Workers are threads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import monotonic
from typing import Any

import pytest
import torch
from gatherings import CPU, buffers, on_hosts, over_gloo, sharing, together
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.base import Communicator, OwnedBuffer, Ownership, Pending
from paceline.comm.shared_memory import peers
from paceline.comm.shared_memory.buffers import SMALL_BYTES
from paceline.core.errors import CommunicationError, CommunicationTimeout

SIZE = 4
Gathering = Callable[..., AbstractContextManager[list[Any]]]
KINDS: dict[str, Gathering] = {
    "one host": partial(sharing, SIZE),
    "2 + 2": partial(on_hosts, [2, 2]),
    "1 + 3": partial(on_hosts, [1, 3]),
    "2 + 1 + 1": partial(on_hosts, [2, 1, 1]),
}
sharing_memory = pytest.mark.parametrize("gathering", KINDS.values(), ids=KINDS)
every_kind = pytest.mark.parametrize("gathering", [*KINDS.values(), partial(over_gloo, SIZE)], ids=[*KINDS, "gloo"])
# Small; of several blocks, pieces and an odd rest.
NUMELS = [1, 40_000, 900_001]


@contextmanager
def never_longer_than(seconds: float) -> Iterator[None]:
    started = monotonic()
    yield
    assert monotonic() - started < seconds


@every_kind
@pytest.mark.parametrize("numel", NUMELS)
def test_all_get_the_sum(gathering: Gathering, numel: int) -> None:
    with gathering() as workers:
        tensors = buffers(workers, numel)
        for factor in (1, SIZE, SIZE**2):  # what one exchange leaves, the next one adds up
            assert not any(together([w.all_reduce(t).wait for w, t in zip(workers, tensors, strict=True)]))
            assert all((t == 10 * factor).all() for t in tensors)


@every_kind
@pytest.mark.parametrize(("source", "numel"), [(0, 1), (1, 40_000), (2, 900_001), (3, 1)])
def test_all_get_what_the_source_has(gathering: Gathering, source: int, numel: int) -> None:
    with gathering() as workers:
        tensors = buffers(workers, numel)
        assert not any(together([w.broadcast(t, source).wait for w, t in zip(workers, tensors, strict=True)]))
        assert all((t == source + 1).all() for t in tensors)


HOLDERS = [(0,), (1, 3), (1, 0), (3,), (2, 1, 0), (0,)]


def owned_by(workers: Sequence[Any], numel: int) -> list[list[OwnedBuffer]]:
    """By rank: buffers of several sizes, with the owners and further holders of HOLDERS."""
    numels = [numel, 1, numel, numel + 5, 3, numel]
    ownership = Ownership(numels, HOLDERS, torch.float64, CPU, num_slots=2)
    return [worker.owned(ownership) for worker in workers]


@every_kind
@pytest.mark.parametrize("numel", NUMELS)
def test_holders_get_the_sum_and_owners_keep_adding_to_it(gathering: Gathering, numel: int) -> None:
    with gathering() as workers:
        owned = owned_by(workers, numel)

        def add_up(rank: int) -> None:
            for turn in (1, 2, 3):
                for number, buffer in enumerate(owned[rank]):
                    is_owner = rank == HOLDERS[number][0]
                    buffer.tensor.add_(rank + 1) if is_owner else buffer.tensor.fill_(rank + 1)
                    buffer.reduce().wait()
                    assert (buffer.total is not None) == (rank in HOLDERS[number])
                    if buffer.total is not None:
                        assert (buffer.total == 10 * turn).all(), (turn, number)
                    assert not is_owner or buffer.total.data_ptr() == buffer.tensor.data_ptr()

        assert not any(together([partial(add_up, rank) for rank in range(SIZE)]))


@every_kind
@pytest.mark.parametrize("numel", NUMELS)
def test_deliveries_reach_the_others_before_the_owner_goes_on(gathering: Gathering, numel: int) -> None:
    """The owners change their memory at once for the next turn. Two deliveries to a worker are in flight at a time."""
    with gathering() as workers:
        owned = owned_by(workers, numel)
        received: list[list[int]] = [[] for _ in workers]

        def deliver(rank: int) -> None:
            for turn in range(3):
                own, others = [], []
                for number, (buffer, (owner, *_)) in enumerate(zip(owned[rank], HOLDERS, strict=True)):

                    def receive(found: torch.Tensor, buffer: Any = buffer, value: int = 10 * turn + number) -> None:
                        assert found.shape == buffer.tensor.shape
                        assert found.dtype == torch.bfloat16
                        assert (found == value).all()
                        received[rank].append(value % 10)

                    if rank == owner:
                        buffer.tensor.view(torch.bfloat16)[: buffer.tensor.numel()] = 10 * turn + number
                        own.append(buffer.deliver(torch.bfloat16, receive))
                        continue
                    if len(others) == 2:
                        others.pop(0).wait()
                    others.append(buffer.deliver(torch.bfloat16, receive))
                for pending in (*others, *own):
                    pending.wait()

        assert not any(together([partial(deliver, rank) for rank in range(SIZE)]))
        assert received == [
            3 * [number for number, (owner, *_) in enumerate(HOLDERS) if owner != rank] for rank in range(SIZE)
        ]


@every_kind
def test_any_tensor_is_exchanged_not_only_those_of_empty(gathering: Gathering) -> None:
    with gathering() as workers:
        tensors = [torch.full((2, 3), rank) for rank in range(SIZE)]
        together([w.all_reduce(t).wait for w, t in zip(workers, tensors, strict=True)])
        assert all((t == 6).all() for t in tensors)
        parts = [t[10:20] for t in buffers(workers, 30)]
        together([w.broadcast(t, 2).wait for w, t in zip(workers, parts, strict=True)])
        assert all((t == 3).all() for t in parts)


@every_kind
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.complex64, torch.bfloat16, torch.uint64])
def test_broadcasts_carry_every_dtype(gathering: Gathering, dtype: torch.dtype) -> None:
    with gathering() as workers:
        tensors = [torch.full((2, 1), rank % 2, dtype=torch.int64).to(dtype) for rank in range(SIZE)]
        assert not any(together([w.broadcast(t, 3).wait for w, t in zip(workers, tensors, strict=True)]))
        assert all(t.tolist() == [[1], [1]] for t in tensors)


@every_kind
def test_a_source_that_is_no_rank_is_an_error(gathering: Gathering) -> None:
    message = "source=4 is not a rank in a world of 4|invalid root rank: 4"
    with gathering() as workers, pytest.raises((ValueError, CommunicationError), match=message):
        workers[0].broadcast(torch.zeros(1), SIZE)


# (buffer, source or None for a sum, wait for it at once)
steps = st.tuples(st.integers(0, 3), st.sampled_from([None, 0, 1, 2, 3]), st.booleans())


@every_kind
@settings(max_examples=8, deadline=None)
@given(st.lists(steps, max_size=20))
def test_any_sequence_of_calls_does_what_a_plain_loop_does(
    gathering: Gathering, sequence: list[tuple[int, int | None, bool]]
) -> None:
    sizes = [4, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, 70_000]
    with gathering() as workers:
        expected = [[rank + 1.0 for rank in range(SIZE)] for _ in sizes]
        for number, source, _ in sequence:
            total = sum(expected[number]) if source is None else expected[number][source]
            expected[number] = [total % 1000] * SIZE

        def run(worker: Communicator) -> list[torch.Tensor]:
            tensors = [worker.empty(numel, torch.float32, CPU).fill_(worker.world.rank + 1) for numel in sizes]
            pending: dict[int, Pending] = {}

            def finish(number: int) -> None:
                if number in pending:
                    pending.pop(number).wait()
                    tensors[number].remainder_(1000)

            for number, source, at_once in sequence:
                finish(number)
                tensor = tensors[number]
                pending[number] = worker.all_reduce(tensor) if source is None else worker.broadcast(tensor, source)
                if at_once:
                    finish(number)
            for number in list(pending):
                finish(number)
            return tensors

        for rank, tensors in enumerate(together([lambda w=w: run(w) for w in workers])):
            assert all((t == want[rank]).all() for t, want in zip(tensors, expected, strict=True))


@sharing_memory
@pytest.mark.parametrize(("missing", "numel"), [(0, NUMELS[-1]), *((rank, 1) for rank in range(SIZE))])
def test_a_missing_worker_is_a_timeout_for_all_others(
    gathering: Gathering, numel: int, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "LEADER_GRACE_S", 0.3)
    with gathering(timeout_s=0.1) as workers, never_longer_than(15):
        calls = [(w, t) for w, t in zip(workers, buffers(workers, numel), strict=True) if w.world.rank != missing]
        errors = together([w.all_reduce(t).wait for w, t in calls])
        # The first worker that times out tells the others, which may report the loss of that worker instead.
        assert all(isinstance(error, CommunicationError) for error in errors), errors
        assert any(isinstance(error, CommunicationTimeout) for error in errors), errors
        lists = [found for error in errors for found in re.findall(r"ranks \[(.*?)\]", str(error))]
        assert any(str(missing) in ranks.split(", ") for ranks in lists), errors


@sharing_memory  # for Gloo: test_process_group.py
@pytest.mark.parametrize(("left", "numel"), [(0, NUMELS[-1]), *((rank, 1) for rank in range(SIZE))])
def test_a_worker_that_leaves_is_an_immediate_error_for_all_others(gathering: Gathering, numel: int, left: int) -> None:
    with gathering(timeout_s=60.0) as workers, never_longer_than(15):
        tensors = buffers(workers, numel)
        together([w.all_reduce(t).wait for w, t in zip(workers, tensors, strict=True)])
        workers[left].close()
        calls = [(w, t) for w, t in zip(workers, tensors, strict=True) if w.world.rank != left]
        errors = together([lambda w=w, t=t: w.all_reduce(t).wait() for w, t in calls])
        assert all(isinstance(error, CommunicationError) for error in errors), errors
        assert not any(isinstance(error, CommunicationTimeout) for error in errors), errors
