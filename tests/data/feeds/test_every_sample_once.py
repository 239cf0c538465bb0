"""The promise of the data layer: an epoch's micro-batches are the same, whoever reads them and wherever a run stops.

Workers are threads here, each with a feed of its own as in a real run, so that hypothesis can try many worlds; a few
examples with real workers follow.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_workers import thread_workers
from torch.utils.data import Dataset, IterableDataset
from worker_pool import WorkerPool

from paceline.comm import connect
from paceline.comm.base import Communicator
from paceline.core.world import World
from paceline.data.feeds.base import Feed
from paceline.data.feeds.make_feed import Connect, DataSettings, as_data, make_feed, make_link
from paceline.data.sources.arrow import ArrowSource
from paceline.data.sources.base import as_source
from paceline.data.sources.skip_bad import SkipBad
from paceline.data.sources.tokens import TokenFile
from paceline.plan.epoch import EpochOrder, Position, Steps
from paceline.plan.shares import Plan, ranges, shares

NUM_EPOCHS = 2
SEED = 5
TIMEOUT_S = 30.0

Kind = Literal["list", "bad samples", "arrow", "tokens", "stream", "stream of files"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# A micro-batch that was trained: epoch, the run's step, the number in it, and the samples.
Trained = tuple[int, int, int, list[int]]


@dataclass(frozen=True)
class Hands:
    """Who does the work: none of it may show in what is trained. `speeds` change from step to step, in turn."""

    num_workers: int = 1
    readers: int = 0
    feed: Literal["sharded", "dispatched"] = "sharded"
    speeds: tuple[tuple[int, ...], ...] = ((1, 1, 1, 1),)


@dataclass(frozen=True)
class Case:
    """A run: samples of each file, sizes, order; and the number of steps after which other hands take over."""

    files: tuple[int, ...]
    micro_batch: int
    per_step: int
    shuffle: bool
    shuffle_buffer: int
    num_shards: int
    stop: int
    num_tries: int  # exact mode may have to begin a step again
    before: Hands
    after: Hands

    @property
    def num_samples(self) -> int:
        return sum(self.files)


def hands() -> st.SearchStrategy[Hands]:
    speeds = st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=1, max_size=3).map(tuple)
    readers = st.sampled_from([0, 0, 0, 0, 1, 2])  # each costs a fork
    return st.builds(Hands, st.integers(1, 4), readers, st.sampled_from(["sharded", "dispatched"]), speeds)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    per_step = draw(st.integers(1, 6))
    return Case(
        files=draw(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)),
        micro_batch=draw(st.integers(1, 4)),
        per_step=per_step,
        shuffle=draw(st.booleans()),
        shuffle_buffer=draw(st.integers(0, 12)),
        num_shards=draw(st.sampled_from([d for d in range(1, per_step + 1) if per_step % d == 0])),
        stop=draw(st.integers(0, 12)),
        num_tries=draw(st.sampled_from([1, 2])),
        before=draw(hands()),
        after=draw(hands()),
    )


def is_bad(sample: int) -> bool:
    return sample % 3 == 0


class Rotten(Dataset[int]):
    """Numbers, of which some cannot be read."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        if is_bad(index):
            raise OSError("rotten")
        return index


class FileStream(IterableDataset[int]):
    """Samples of several files, one after another; it can be divided by files."""

    def __init__(self, files: Sequence[range]) -> None:
        self._files = files
        self.num_shards = len(files)

    def shard(self, num_shards: int, index: int) -> FileStream:
        return FileStream(self._files[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(*self._files)


def numbered(files: Sequence[int]) -> list[range]:
    """The numbers of each file's samples."""
    return [range(start, stop) for start, stop in itertools.pairwise(itertools.accumulate(files, initial=0))]


def write_arrow(folder: Path, files: Sequence[int]) -> list[Path]:
    """A file of each format in turn, in record batches or row groups of 3."""
    paths = []
    for number, samples in enumerate(numbered(files)):
        table = pa.table({"id": pa.array(samples, pa.int64())})
        paths.append(folder / f"{number}-{samples.start}-{samples.stop}")
        if number % 3 == 2:
            pq.write_table(table, paths[-1], row_group_size=3)
        else:
            new = (pa.ipc.new_file, pa.ipc.new_stream)[number % 3]
            with new(paths[-1], table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
    return paths


def write_tokens(folder: Path, files: Sequence[int]) -> list[Path]:
    """Windows of two tokens, of which the first is twice the sample's number; the last window's target follows."""
    paths = []
    for samples in numbered(files):
        paths.append(folder / f"{samples.start}-{samples.stop}.bin")
        np.arange(2 * samples.start, 2 * samples.stop + 1, dtype=np.uint16).tofile(paths[-1])
    return paths


def maker(kind: Kind, files: Sequence[int], folder: Path) -> Callable[[], Any]:
    """Makes the user's data, once for each worker."""
    if kind == "list":
        return lambda: list(range(sum(files)))
    if kind == "bad samples":
        return lambda: SkipBad(as_source(Rotten(sum(files))), on_skip=lambda _: None)
    if kind == "arrow":
        return partial(ArrowSource, write_arrow(folder, files))
    if kind == "tokens":
        return partial(TokenFile, write_tokens(folder, files), length=2)
    if kind == "stream":
        return lambda: FileStream([range(sum(files))])
    return lambda: FileStream(numbered(files))


def ids_of(batch: Any) -> list[int]:
    if isinstance(batch, dict):
        return batch["id"].tolist()
    return (batch.x[:, 0] // 2).tolist() if hasattr(batch, "x") else batch.tolist()


class Planner:
    """Deals each step by other speeds, as a planner does that measures: all know how many steps were taken."""

    def __init__(self, step_size: int, hands: Hands) -> None:
        self._step_size = step_size
        self._speeds = [row[: hands.num_workers] for row in hands.speeds]
        self.taken = 0

    def __call__(self, num_left: int) -> Plan:
        speeds = self._speeds[self.taken % len(self._speeds)]
        return ranges(shares(min(num_left, self._step_size), speeds if any(speeds) else [1] * len(speeds)))


def train(
    feed: Feed, planner: Planner, rank: int, position: Position, stop: int, num_tries: int
) -> tuple[list[Trained], Position]:
    """One worker's way from this position to the step where it stops, or to the end."""
    trained: list[Trained] = []
    while position.epoch < NUM_EPOCHS and position.step < stop:
        tries = [read_step(feed, rank, position) for _ in range(num_tries)]
        assert all(each == tries[0] for each in tries)
        if tries[0] is None:
            position = position.next_epoch()
            continue
        own, position = tries[0]
        trained += own
        planner.taken += 1
    return trained, position


def read_step(feed: Feed, rank: int, position: Position) -> tuple[list[Trained], Position] | None:
    step = feed.begin_step(position)
    if step is None:
        return None
    trained: list[Trained] = []
    for k in step.plan[rank]:
        batch, weight = feed.micro_batch(range(k, k + 1))
        ids = [] if batch is None else ids_of(batch)
        assert weight == len(ids)
        trained.append((position.epoch, position.step, k, ids))
    return trained, step.after


def data_settings(case: Case, kind: Kind, hands: Hands) -> DataSettings:
    if "stream" not in kind:
        return DataSettings(SEED, case.shuffle, hands.feed, hands.readers)
    return DataSettings(
        SEED, case.shuffle, hands.feed, hands.readers, num_shards=case.num_shards, shuffle_buffer=case.shuffle_buffer
    )


def feed_for(
    make_data: Callable[[], Any],
    case: Case,
    kind: Kind,
    hands: Hands,
    planner: Planner,
    communicator: Communicator,
    connect: Connect = make_link,
) -> Feed:
    samples_per_step = case.per_step * case.micro_batch
    num_samples = samples_per_step if "stream" in kind else case.num_samples
    steps = Steps(num_samples, samples_per_step, case.micro_batch)
    data = as_data(make_data(), collate_fn=None, seed=SEED)
    return make_feed(data, data_settings(case, kind, hands), steps, planner, communicator, connect)


def run(
    make_data: Callable[[], Any], case: Case, kind: Kind, hands: Hands, position: Position, stop: int
) -> tuple[list[Trained], Position]:
    """What all workers trained, in the order of micro-batches, and where the run stands then."""
    links = thread_workers(hands.num_workers, TIMEOUT_S)
    workers = []
    for rank, link in enumerate(links):  # feeds first, threads after: feeds fork their readers
        planner = Planner(case.per_step, hands)
        feed = feed_for(make_data, case, kind, hands, planner, link, lambda world, *_: links[world.rank])
        workers.append((feed, planner, rank))
    with ThreadPoolExecutor(len(workers)) as threads:
        try:
            outcomes = list(threads.map(lambda worker: train(*worker, position, stop, case.num_tries), workers))
        finally:  # all at once, since what a feed has under way may need the other workers
            list(threads.map(lambda worker: worker[0].close(), workers))
    assert len({reached for _, reached in outcomes}) == 1
    return sorted(itertools.chain(*(trained for trained, _ in outcomes))), outcomes[0][1]


def readable(case: Case, kind: Kind) -> list[int]:
    """The samples that an epoch trains."""
    return [i for i in range(case.num_samples) if kind != "bad samples" or not is_bad(i)]


def expected_order(case: Case, kind: Kind, epoch: int) -> list[list[int]] | None:
    """The samples of the epoch's micro-batches where a few lines can tell."""
    size = case.micro_batch
    if "stream" not in kind:
        order = EpochOrder(case.num_samples, seed=SEED, epoch=epoch, shuffle=case.shuffle)
        indices = order.indices(0, case.num_samples).tolist()
        good = set(readable(case, kind))
        cut = (indices[i : i + size] for i in range(0, len(indices), size))
        return [[sample for sample in micro_batch if sample in good] for micro_batch in cut]
    if case.shuffle_buffer:
        return None
    files = [range(case.num_samples)] if kind == "stream" else numbered(case.files)
    count = case.num_shards
    if len(files) % count == 0:
        shards = [list(itertools.chain(*files[index::count])) for index in range(count)]
    else:
        shards = [list(range(case.num_samples))[index::count] for index in range(count)]
    rows = [[shard[i : i + size] for shard in shards] for i in range(0, case.num_samples, size)]
    return [micro_batch for row in rows for micro_batch in row if micro_batch]


def check(kind: Kind, case: Case, folder: Path) -> None:
    make_data = maker(kind, case.files, folder)
    whole, end = run(make_data, case, kind, Hands(), Position(), 10**6)

    for epoch in range(NUM_EPOCHS):
        micro_batches = [ids for trained_in, _, _, ids in whole if trained_in == epoch]
        assert sorted(itertools.chain(*micro_batches)) == readable(case, kind)
        assert expected_order(case, kind, epoch) in (None, micro_batches)
    for count, (step, of_step) in enumerate(itertools.groupby(whole, key=itemgetter(1))):
        assert step == count
        numbers = [k for _, _, k, _ in of_step]
        assert numbers == list(range(len(numbers)))

    before, position = run(make_data, case, kind, case.before, Position(), case.stop)
    position = Position.from_dict(json.loads(json.dumps(position.to_dict())))
    after, reached = run(make_data, case, kind, case.after, position, 10**6)
    assert before + after == whole
    assert reached == end


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def check_examples(kind: Kind, folder: Path, count: int) -> None:
    numbers = itertools.count()

    @settings(max_examples=count)
    @given(cases())
    def examples(case: Case) -> None:
        own_folder = folder / str(next(numbers))
        own_folder.mkdir()
        check(kind, case, own_folder)

    examples()


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_once_in_one_order_before_and_after_a_stop(kind: Kind, tmp_path: Path) -> None:
    check_examples(kind, tmp_path, 12)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_once_in_many_more_worlds(kind: Kind, tmp_path: Path) -> None:
    check_examples(kind, tmp_path, 300)


@pytest.mark.parametrize("kind", ["arrow", "stream of files"])
def test_real_workers_train_what_one_does(kind: Kind, tmp_path: Path, pool: WorkerPool) -> None:
    uneven = ((2, 1, 1, 0), (1, 3, 0, 1))
    case = Case(
        files=(9, 2, 14, 8), micro_batch=2, per_step=4, shuffle=True, shuffle_buffer=5, num_shards=2, stop=3,
        num_tries=1, before=Hands(2, 1, "sharded", uneven), after=Hands(3, 2, "dispatched", uneven),
    )  # fmt: skip
    make_data = maker(kind, case.files, tmp_path)
    whole, _ = run(make_data, case, kind, Hands(), Position(), 10**6)
    for before, after in ((case.before, case.after), (case.after, case.before)):
        course: list[Trained] = []
        position = Position()
        for hands, stop in ((before, case.stop), (after, 10**6)):
            outcomes = pool.run(work, hands.num_workers, make_data, case, kind, hands, position, stop)
            course += sorted(itertools.chain(*(trained for trained, _ in outcomes)))
            position = outcomes[0][1]
        assert course == whole


def work(
    make_data: Callable[[], Any], case: Case, kind: Kind, hands: Hands, position: Position, stop: int
) -> tuple[list[Trained], Position]:
    """One worker of a real world."""
    world = World.from_environment()
    with closing(connect(world, "gloo", TIMEOUT_S)) as communicator:
        planner = Planner(case.per_step, hands)
        with closing(feed_for(make_data, case, kind, hands, planner, communicator)) as feed:
            return train(feed, planner, world.rank, position, stop, case.num_tries)
