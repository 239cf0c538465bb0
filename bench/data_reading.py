"""Reading alone: tensors in memory, Arrow files, and the start over many files."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import functional

from bench import overhead
from bench.data_files import COLUMN, write_files
from bench.harness import Contestant, Result, alternate, isolated

BY_HAND, FEED = "indexed by hand", "paceline's feed"
ARROW, HF_MAP, HF_ITERABLE = "paceline Arrow source", "HF map-style", "HF iterable"
FIRST, SECOND = "first start", "second start"

MICRO_BATCH = 32
LENGTH = 128
SHUFFLE_BUFFER = 1000
WARMUP_BATCHES = 20


def in_memory(num_turns: int, num_steps: int) -> Result:
    """Microseconds per step of one hand-written loop over a tiny model, and who gathers its batches."""
    torch.set_num_threads(1)
    task = overhead.Task.make(num_steps, by_sample=False, folder="")
    builders = {BY_HAND: overhead.bare, FEED: fed}
    contestants = {name: isolated(partial(build, task)) for name, build in builders.items()}
    alternate(contestants, 1)
    return Result.of(
        "data: in memory",
        "microseconds per step",
        alternate(contestants, num_turns),
        ours=FEED,
        limit=BY_HAND,
        better="lower",
        settings={"model": "-".join(map(str, overhead.WIDTHS)), "batch": overhead.BATCH, "steps_per_turn": num_steps},
    )


def fed(task: overhead.Task) -> Contestant:
    """The loop of `overhead.bare`, its batches from the feed that a run would use."""
    from paceline.comm.single import SingleCommunicator
    from paceline.core.world import World
    from paceline.data.feeds.make_feed import DataSettings, as_data, make_feed
    from paceline.plan.epoch import Position, Steps
    from paceline.run.step.planner import FixedPlanner

    model = overhead.make_model()
    optimizer = overhead.make_optimizer(model.parameters())
    feed = make_feed(
        as_data((task.x, task.y), collate_fn=None, seed=0),
        DataSettings(seed=0, shuffle=True),
        Steps(overhead.NUM_SAMPLES, overhead.BATCH, overhead.BATCH),
        FixedPlanner(1, (1.0,)).plan,
        SingleCommunicator(World()),
    )

    def loop() -> Iterator[None]:
        position = Position()
        while True:
            step = feed.begin_step(position)
            assert step is not None
            batch, _ = feed.micro_batch(step.plan[0])
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(batch.x), batch.y).backward()
            optimizer.step()
            position = feed.after_step(position)
            yield

    return task.timed(loop())


def arrow(folder: Path, num_turns: int, num_batches: int) -> Result:
    """Samples per second out of the same files, in random order, as tensors."""
    torch.set_num_threads(1)
    paths = write_files(folder, num_files=8, rows=4000, length=LENGTH, vocabulary=50_000, rows_per_batch=1000)
    readers = {ARROW: ours(paths), HF_MAP: hf_map(paths), HF_ITERABLE: hf_iterable(paths)}
    contestants = {name: partial(samples_per_s, batches, num_batches) for name, batches in readers.items()}
    for batches in readers.values():
        for batch in itertools.islice(batches, WARMUP_BATCHES):
            assert batch.shape == (MICRO_BATCH, LENGTH)
            assert batch.dtype == torch.int64
    return Result.of(
        "data: Arrow",
        "samples/s",
        alternate(contestants, num_turns),
        ours=ARROW,
        limit=HF_MAP,
        better="higher",
        settings={
            "files": len(paths), "rows_per_file": 4000, "rows_per_record_batch": 1000, "row": f"{LENGTH} int64",
            "micro_batch": MICRO_BATCH, "hf_iterable_shuffle_buffer": SHUFFLE_BUFFER,
        },
        packages=("datasets", "pyarrow"),
    )  # fmt: skip


def samples_per_s(batches: Iterator[Any], num_batches: int) -> float:
    start = time.perf_counter()
    for _ in itertools.islice(batches, num_batches):
        pass
    return num_batches * MICRO_BATCH / (time.perf_counter() - start)


def ours(paths: list[str]) -> Iterator[torch.Tensor]:
    from paceline.data.sources.arrow import ArrowSource

    source = ArrowSource(paths)
    return (source.read(indices, 0, 0)[COLUMN] for indices in shuffled(len(source)))


def shuffled(num_samples: int) -> Iterator[Any]:
    """The numbers of every whole micro-batch, epoch after epoch: what a run computes, and what HF is given too."""
    from paceline.plan.epoch import EpochOrder

    for epoch in itertools.count():
        order = EpochOrder(num_samples, seed=0, epoch=epoch)
        for start in range(0, num_samples - MICRO_BATCH + 1, MICRO_BATCH):
            yield order.indices(start, start + MICRO_BATCH)


def hf_dataset(paths: list[str]) -> Any:
    from datasets import Dataset, concatenate_datasets, disable_progress_bars  # type: ignore[import-untyped]

    disable_progress_bars()
    return concatenate_datasets([Dataset.from_file(path) for path in paths]).with_format("torch")


def hf_map(paths: list[str]) -> Iterator[torch.Tensor]:
    """A whole micro-batch at a time, the fastest way it has."""
    dataset = hf_dataset(paths)
    return (dataset[indices.tolist()][COLUMN] for indices in shuffled(len(dataset)))


def hf_iterable(paths: list[str]) -> Iterator[torch.Tensor]:
    """Batches out of a shuffle buffer."""
    dataset = hf_dataset(paths).to_iterable_dataset(len(paths)).shuffle(seed=0, buffer_size=SHUFFLE_BUFFER)
    dataset = dataset.with_format("torch")
    for epoch in itertools.count():
        dataset.set_epoch(epoch)
        yield from (batch[COLUMN] for batch in dataset.iter(MICRO_BATCH, drop_last_batch=True))


def second_start(folder: Path, num_turns: int, num_files: int) -> Result:
    """Seconds to open many files: unknown, and with their index from the start before. All are in the page cache."""
    write_files(folder, num_files=num_files, rows=1000, length=LENGTH, vocabulary=50_000, rows_per_batch=100)
    seconds: dict[str, list[float]] = {FIRST: [], SECOND: []}
    for _ in range(num_turns + 1):
        with TemporaryDirectory(dir=folder) as cache:
            os.environ["PACELINE_CACHE"] = cache
            for turns in seconds.values():
                turns.append(seconds_of(partial(open_files, folder)))
    return Result.of(
        "data: second start",
        "seconds",
        {name: turns[1:] for name, turns in seconds.items()},  # the first ones import pyarrow
        ours=SECOND,
        limit=FIRST,
        better="lower",
        settings={"files": num_files, "record_batches_per_file": 10, "row": f"{LENGTH} int64"},
        packages=("pyarrow",),
    )


def open_files(folder: Path) -> None:
    from paceline.data.sources.arrow import ArrowSource

    ArrowSource(folder)


def seconds_of(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
