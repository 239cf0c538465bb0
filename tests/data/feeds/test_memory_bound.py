"""Reading takes the memory it was allowed, however much data there is."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from grouping import grouped
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from worker_pool import WorkerPool

import paceline as pl

MIB = 1 << 20
SLACK = 64 * MIB
SAMPLE = MIB
BUFFER = 32  # samples


@pytest.fixture(scope="module")
def fresh_pool() -> Iterator[WorkerPool]:
    """Workers whose memory is what they hold: large blocks go back to the system at once.

    Left to itself, glibc keeps up to as much again in the gaps between torch's aligned blocks.
    """
    pool = WorkerPool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(64 << 10))
        pool.run(int, 2)
    yield pool
    pool.close()


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, num_samples: int, sample_bytes: int) -> None:
        self._num_samples = num_samples
        self._sample_bytes = sample_bytes

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((self._sample_bytes // 4,), float(i)) for i in range(self._num_samples))


class Numbered(Dataset[torch.Tensor]):
    def __init__(self, num_samples: int, sample_bytes: int) -> None:
        self._num_samples = num_samples
        self._sample_bytes = sample_bytes

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self._sample_bytes // 4,), float(index))


def peak_of_epoch(data: Any, settings: dict[str, Any]) -> int:
    """The most that was resident after a micro-batch of an epoch."""
    # What runs before this one left to the allocator is given back: it would hide what this one takes.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    peak = 0
    settings = {"global_batch": 4, "micro_batch": 2, **settings}
    with pl.Trainer.setup(
        nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.0), data=data, **grouped(**settings)
    ) as trainer:
        processes = [psutil.Process(), *psutil.Process().children()]  # this worker and its readers
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(trainer.model(batch[:, :1]).mean())
                trainer.step()
                peak = max(peak, sum(process.memory_info().rss for process in processes))
    return peak


def grown_bytes(kind: type[Stream] | type[Numbered], num_samples: int, settings: dict[str, Any]) -> int:
    """How far memory grows beyond that of the same run over next to nothing, which warms everything up."""
    warm = peak_of_epoch(kind(4 * BUFFER, 4), settings)
    return peak_of_epoch(kind(num_samples, SAMPLE), settings) - warm


@pytest.mark.parametrize(
    ("num_workers", "num_shards", "settings"),
    [
        pytest.param(1, 1, {}, marks=pytest.mark.soak),
        (1, 2, {"readers": 2}),
        pytest.param(2, 1, {"readers": 1, "feed": "dispatched"}, marks=pytest.mark.soak),
    ],
)
def test_a_stream_takes_its_shuffle_buffers(
    num_workers: int, num_shards: int, settings: dict[str, Any], fresh_pool: WorkerPool
) -> None:
    allowed_samples = num_shards * BUFFER
    settings = {"shuffle_buffer": BUFFER, "num_shards": num_shards, **settings}
    grown = fresh_pool.run(grown_bytes, num_workers, Stream, 5 * allowed_samples, settings)
    assert max(grown) < allowed_samples * SAMPLE + SLACK
    # Else nothing of the kind was measured. Rank 0 holds the buffers, or its readers do.
    assert grown[0] > allowed_samples * SAMPLE / 2


def test_numbered_samples_take_what_is_read_ahead(fresh_pool: WorkerPool) -> None:
    micro_batches_ahead = BUFFER // 2
    settings = {"readers": 2, "prefetch": micro_batches_ahead}
    (grown,) = fresh_pool.run(grown_bytes, 1, Numbered, 5 * BUFFER, settings)
    assert grown < BUFFER * SAMPLE + SLACK
