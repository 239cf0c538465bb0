"""Training while reading: who reads, how, and what it costs when reading has to wait."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, distributed
from torch.utils.data import Dataset, IterableDataset

from bench import scaling
from bench.data_files import COLUMN, write_files
from bench.data_reading import hf_dataset
from bench.harness import Result, alternate, isolated
from bench.scaling import LENGTH, VOCABULARY, Loop, Task, make_tokens
from bench.workers import gloo_group, run_workers

SHARDED, DISPATCHED = "sharded", "dispatched"
ITERABLE, FAST_ITERABLE, SHARDED_ITERABLE = "iterable", "fast iterable", "sharded iterable"
IN_MEMORY, WAITING, WAITING_STREAM, NO_READERS = "in memory", "waiting source", "waiting stream", "waiting, no readers"

NUM_FILES = 8
SHUFFLE_BUFFER = 256
# How long the source waits for a micro-batch, as a part of the time that computing it takes.
WAIT = 0.8

# What each contestant trains with, called with the task and the rank.
Loops: TypeAlias = Mapping[str, Callable[[Task, int], Loop]]


def train(make_data: Callable[[], Any], task: Task, rank: int, **loading: Any) -> Loop:
    import paceline as pl

    def tokens_of(batch: Any) -> Tensor:
        tokens: Tensor = batch[COLUMN] if isinstance(batch, dict) else batch
        return tokens

    return scaling.paceline(
        task, rank, data=make_data(), tokens_of=tokens_of, shares="equal", loading=pl.Loading(**loading)
    )


def strategies(folder: Path, task: Task) -> Result:
    """Samples per second of workers that train together, by what they read the same files with.

    As in forgather's table: a map-style data set of HF's, sharded and dispatched; its iterable form, read by one worker
    or by files; and, for the fast iterable, our source for the files themselves.
    """
    paths = write_files(
        folder,
        num_files=NUM_FILES,
        rows=scaling.NUM_SAMPLES // NUM_FILES,
        length=LENGTH,
        vocabulary=VOCABULARY,
        rows_per_batch=100,
    )
    return Result.of(
        "data: strategies",
        "samples/s",
        measure_together(task, strategy_loops, paths),
        ours=DISPATCHED,
        limit=SHARDED,
        better="higher",
        settings={**asdict(task), "shuffle_buffer": SHUFFLE_BUFFER, "files": NUM_FILES},
        packages=("datasets", "pyarrow"),
    )


def strategy_loops(paths: list[str]) -> Loops:
    from paceline.data.sources.arrow import ArrowSource

    hf_map = partial(hf_dataset, paths)

    def hf_iterable() -> Any:
        return hf_map().to_iterable_dataset(len(paths)).with_format("torch")

    stream: dict[str, Any] = {"shuffle_buffer": SHUFFLE_BUFFER, "readers": 1}
    return {
        SHARDED: partial(train, hf_map),
        DISPATCHED: partial(train, hf_map, feed="dispatched", readers=1),
        ITERABLE: partial(train, hf_iterable, feed="dispatched", num_shards=1, **stream),
        FAST_ITERABLE: partial(train, partial(ArrowSource, paths)),
        SHARDED_ITERABLE: partial(train, hf_iterable, **stream),
    }


def waiting(task: Task) -> Result:
    """Samples per second over a source that waits, as a disk or a network does, against the same data in memory."""
    (in_memory,) = measure_together(replace(task, num_turns=3), in_memory_loop).values()
    wait_s = WAIT * task.micro_batch / statistics.median(in_memory)
    return Result.of(
        "data: waiting",
        "samples/s",
        measure_together(task, waiting_loops, wait_s, task.micro_batch),
        ours=WAITING,
        limit=IN_MEMORY,
        better="higher",
        settings={**asdict(task), "wait_ms_per_micro_batch": 1000 * wait_s, "readers": 1},
        not_peers=(WAITING_STREAM, NO_READERS),
    )


def in_memory_loop() -> Loops:
    return {IN_MEMORY: partial(train, make_tokens)}


def waiting_loops(wait_s: float, micro_batch: int) -> Loops:
    numbered, stream = partial(WaitingTokens, wait_s), partial(WaitingStream, wait_s / micro_batch)
    return {
        **in_memory_loop(),
        WAITING: partial(train, numbered, readers=1),
        WAITING_STREAM: partial(train, stream, num_shards=1, readers=1),
        NO_READERS: partial(train, numbered),
    }


class WaitingTokens(Dataset[Tensor]):
    """Waits once for each micro-batch."""

    def __init__(self, wait_s: float) -> None:
        self._tokens = make_tokens()
        self._wait_s = wait_s

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        time.sleep(self._wait_s)
        return list(self._tokens[indices])


class WaitingStream(IterableDataset[Tensor]):
    """Waits for each sample."""

    def __init__(self, wait_s: float) -> None:
        self._tokens = make_tokens()
        self._wait_s = wait_s

    def __iter__(self) -> Iterator[Tensor]:
        for tokens in self._tokens:
            time.sleep(self._wait_s)
            yield tokens


def measure_together(task: Task, make_loops: Callable[..., Loops], *arguments: Any) -> dict[str, list[float]]:
    """Samples per second of all workers, turn by turn."""
    by_rank: list[dict[str, list[float]]] = run_workers(worker, task.num_workers, task, make_loops, *arguments)
    turns = {name: zip(*(own[name] for own in by_rank), strict=True) for name in by_rank[0]}
    return {name: [scaling.samples_per_s(name, step_s, task) for step_s in turns[name]] for name in turns}


def worker(task: Task, make_loops: Callable[..., Loops], *arguments: Any) -> dict[str, list[float]]:
    """One worker's measurements, in seconds per step."""
    with gloo_group():
        contestants = {
            name: isolated(partial(scaling.contestant, task, distributed.get_rank(), loop))
            for name, loop in make_loops(*arguments).items()
        }
        measurements = alternate(contestants, task.num_turns)
        contestants.clear()  # the loops end here, while the group they talk over is still there
        return measurements
