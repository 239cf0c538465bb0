"""Streams and dispatched reading: the same micro-batches whoever reads them, every sample exactly once."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import training
from hypothesis import given
from hypothesis import strategies as st
from models import vectors
from torch.utils.data import IterableDataset
from worker_pool import WorkerPool

from paceline.comm.single import SingleCommunicator
from paceline.core.world import World
from paceline.data.feeds.make_feed import DataSettings, make_feed
from paceline.data.sources.streams import IterableStream, StreamReader, StreamRequest, shuffled
from paceline.plan.epoch import Position, Steps
from paceline.plan.shares import ranges

X, Y = vectors(50)


class Letters(IterableDataset):
    """A stream of 50 samples with noise from two generators."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for x, y in zip(X, Y, strict=True):
            yield x + 0.1 * random.random() + 0.1 * torch.rand(()), y


class Noisy:
    """The same, numbered."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[index] + 0.1 * random.random() + 0.1 * torch.rand(()), Y[index]


def train(data: Any, **settings: Any) -> tuple[str, list[float]]:
    return training.train(data, **{"global_batch": 16, "micro_batch": 2, **settings})


def test_a_stream_ends_in_one_smaller_step() -> None:
    _, weights = train(Letters())
    assert weights == [16, 16, 16, 2] * 2


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.soak), 3, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["numbered", "stream"])
def test_sharded_and_dispatched_readers_and_workers_change_no_weight(kind: str, size: int, pool: WorkerPool) -> None:
    def data() -> Any:
        return Noisy() if kind == "numbered" else Letters()

    expected = train(data())
    for settings in ({}, {"feed": "dispatched"}, {"feed": "dispatched", "readers": 2}, {"readers": 2}):
        outcomes = pool.run(lambda settings: train(data(), **settings), size, settings)
        assert outcomes == [expected] * size, settings


def test_a_shuffle_buffer_changes_the_order_the_same_way_everywhere(pool: WorkerPool) -> None:
    expected = train(Letters(), shuffle_buffer=10)
    assert expected != train(Letters())
    assert pool.run(lambda: train(Letters(), shuffle_buffer=10, readers=1), 3) == [expected] * 3


def test_unequal_shards_leave_gaps_that_nobody_trains(pool: WorkerPool) -> None:
    class Files(IterableDataset):
        """Divides itself by files, of which one is much longer."""

        num_shards = 4

        def __init__(self, files: Any = None) -> None:
            sizes = [3, 20, 4, 5]
            starts = [0, *itertools.accumulate(sizes)]
            self.files = files or [range(a, b) for a, b in itertools.pairwise(starts)]

        def shard(self, num_shards: int, index: int) -> Files:
            return Files(self.files[index::num_shards])

        def __iter__(self) -> Iterator[Any]:
            return ((X[i], Y[i]) for file in self.files for i in file)

    expected = train(Files(), num_shards=4)
    assert sum(expected[1]) == 2 * 32
    assert pool.run(lambda: train(Files(), num_shards=4), 3) == [expected] * 3


@given(
    num_samples=st.integers(1, 40),
    micro_batch=st.integers(1, 4),
    per_step=st.sampled_from([1, 2, 4, 6]),
    shards=st.sampled_from([1, 2]),
    buffer=st.integers(0, 12),
    cut=st.integers(0, 6),
    readers=st.just(0),
)
def test_every_sample_once_also_after_a_stop(
    num_samples: int, micro_batch: int, per_step: int, shards: int, buffer: int, cut: int, readers: int
) -> None:
    num_shards = shards if per_step % shards == 0 else 1

    def steps_from(position: Position, limit: int | None) -> tuple[list[list[int]], Position]:
        """The samples of each step, and where the run stands then; each step's parts come from another worker."""
        steps = Steps(per_step * micro_batch, per_step * micro_batch, micro_batch)
        settings = DataSettings(seed=3, shuffle=True, num_shards=num_shards, shuffle_buffer=buffer, readers=readers)
        feed = make_feed(
            IterableStream(list(range(num_samples)), 3), settings, steps, lambda left: ranges((min(left, per_step),)),
            SingleCommunicator(World()),
        )  # fmt: skip
        found = []
        while (limit is None or len(found) < limit) and (step := feed.begin_step(position)):
            found.append([i for k in step.plan[0] for i in feed.micro_batch(range(k, k + 1))[0].tolist()])
            position = step.after
        feed.close()
        return found, position

    whole, _ = steps_from(Position(), None)
    assert sorted(i for step in whole for i in step) == list(range(num_samples))
    before, position = steps_from(Position(), cut)
    after, _ = steps_from(position, None)
    assert before + after == whole


@given(st.integers(0, 60), st.integers(1, 12), st.integers(0, 2**60))
def test_a_shuffle_buffer_draws_each_sample_from_the_next_ones(num_samples: int, size: int, seed: int) -> None:
    drawn = list(shuffled(iter(range(num_samples)), size, seed))
    assert sorted(drawn) == list(range(num_samples))
    # No sample comes more than the buffer's size too early.
    assert all(sample < place + size for place, sample in enumerate(drawn))


def test_the_draws_of_a_shuffle_buffer_are_fixed() -> None:
    assert list(shuffled(iter(range(12)), 4, 7)) == [3, 2, 5, 4, 6, 0, 7, 9, 10, 1, 11, 8]


def test_a_reader_of_a_stream_may_go_back() -> None:
    settings = DataSettings(seed=0, shuffle=True, num_shards=2)
    reader = StreamReader(IterableStream(list(range(20))), settings, Steps(4, 4, 2))
    order = [0, 1, 4, 5, 2, 0, 9]
    found = [reader(StreamRequest(0, number)).batch.tolist() for number in order]
    assert found == [[0, 2], [1, 3], [8, 10], [9, 11], [4, 6], [0, 2], [17, 19]]
    assert reader(StreamRequest(0, 10)).batch is None


def test_a_stream_that_failed_while_samples_were_skipped_is_read_again_from_its_start() -> None:
    class FailsOnce:
        has_failed = False

        def __iter__(self) -> Iterator[int]:
            for i in range(8):
                if i == 3 and not self.has_failed:
                    self.has_failed = True
                    raise OSError("rotten")
                yield i

    reader = StreamReader(IterableStream(FailsOnce()), DataSettings(seed=0, shuffle=True), Steps(4, 4, 2))
    assert reader(StreamRequest(0, 0)).batch.tolist() == [0, 1]
    with pytest.raises(OSError, match="rotten"):
        reader(StreamRequest(0, 2))
    assert reader(StreamRequest(0, 2)).batch.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_shards": 3}, "num_shards=3 does not divide the 8 micro-batches of a step: choose one of 1, 2, 4, 8"),
        ({"drop_last": True}, "drop_last=True needs data with numbered samples"),
        ({"prefetch": 2}, "prefetch would be ignored"),
        ({"physical_batch": 4, "exact": False}, "physical_batch needs data with numbered samples"),
        ({"feed": "pigeon"}, "feed='pigeon' is unknown: choose 'sharded' or 'dispatched'"),
        ({"shuffle_buffer": -1}, "shuffle_buffer=-1"),
    ],
)
def test_what_a_stream_cannot(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        train(Letters(), **settings)


def test_what_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(TypeError, match="data is a generator, which can be read only once"):
        train(x for x in range(3))


def test_an_error_in_the_stream_names_the_sample(pool: WorkerPool) -> None:
    class Broken(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            for i in range(50):
                if i == 21:
                    raise OSError("rotten")
                yield X[i], Y[i]

    with pytest.raises(OSError, match="rotten") as caught:
        train(Broken())
    assert "while reading sample 21 of the stream in epoch 0" in caught.value.__notes__
    with pytest.raises(AssertionError, match="rotten"):
        pool.run(lambda: train(Broken(), feed="dispatched", readers=1), 2)


def test_rank_0_alone_reads_what_is_dispatched(pool: WorkerPool) -> None:
    class Counting:
        reads = 0

        def __len__(self) -> int:
            return 48

        def __getitem__(self, index: int) -> Any:
            assert os.environ["RANK"] == "0"
            return X[index], Y[index]

    outcomes = pool.run(lambda: train(Counting(), feed="dispatched"), 2)
    assert outcomes[0] == outcomes[1]
