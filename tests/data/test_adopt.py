"""What users already have is taken as it is: torch's DataLoader with its sampler, sizes and functions."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch.nn import functional
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from training import train
from worker_pool import WorkerPool

import paceline as pl
from paceline.comm.single import SingleCommunicator
from paceline.core.world import World
from paceline.data.adopt import LoadingOptions, adopt
from paceline.data.array_loader import ArrayLoader
from paceline.data.epochs import Ordered, epochs_of
from paceline.data.feeds.make_feed import DataSettings, make_feed
from paceline.data.sources.base import Columns, as_source
from paceline.plan.epoch import Position, Steps
from paceline.plan.shares import ranges

X, Y = vectors(50)


class Noisy(Dataset):
    """Fifty samples with noise from two generators."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[index] + 0.1 * random.random() + 0.1 * torch.rand(()), Y[index]


class NoisyBatches(Dataset):
    """The same as 17 batches of up to three."""

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(3 * index, 3 * index + 3)
        return X[rows] + 0.1 * random.random() + 0.1 * torch.rand(()), Y[rows]


class Given(Sampler):
    """An order, another one for every epoch."""

    def __init__(self, orders: list[Any]) -> None:
        self.orders = orders
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self.orders[self.epoch])


class ByLength(Sampler):
    """Batches of one to four samples, as many as it takes; another number of them in every epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(50).tolist()
        while order:
            size = random.randint(1, 4)
            yield order[:size]
            order = order[size:]


def numbers(data: Any, epochs: int = 2, **settings: Any) -> list[list[list[int]]]:
    """The micro-batches that one worker sees of a data set of numbers, by epoch."""
    with pl.Trainer.setup(
        lambda: torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1), data=data, **grouped(**settings)
    ) as trainer:
        seen = []
        for epoch in trainer.epochs(epochs):
            seen.append([])
            for batch in epoch:
                seen[-1].append(batch.tolist())
                trainer.backward(trainer.model(batch.float().reshape(-1, 1)).mean())
                trainer.step()
    return seen


LOADERS = {
    "sequential": lambda: DataLoader(Noisy(), batch_size=2),
    "shuffled": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True),
    "weighted": lambda: DataLoader(Noisy(), batch_size=2, sampler=WeightedRandomSampler([1.0, 3.0] * 25, 37)),
    "by length": lambda: DataLoader(Noisy(), batch_sampler=ByLength()),
    "whole batches": lambda: DataLoader(NoisyBatches(), batch_size=None, shuffle=True),
}
BY_BATCH = {"batches_per_step": 8}
STEPS = {name: {"global_batch": 16} for name in LOADERS} | {"by length": BY_BATCH, "whole batches": BY_BATCH}


@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["short", "long"])
@pytest.mark.parametrize("name", LOADERS)
def test_workers_readers_and_feeds_change_no_weight(name: str, is_long: bool, pool: WorkerPool) -> None:
    expected = train(LOADERS[name](), **STEPS[name])
    assert sum(expected[1]) == (74 if name == "weighted" else 100)
    worlds: list[tuple[int, dict[str, Any]]] = [(3, {"feed": "dispatched", "readers": 2})]
    if is_long:
        assert train(LOADERS[name](), **STEPS[name], readers=2) == expected
        worlds += [(2, {}), (3, {"readers": 2}), (2, {"feed": "dispatched"})]
    for size, settings in worlds:
        outcomes = pool.run(lambda settings: train(LOADERS[name](), **STEPS[name], **settings), size, settings)
        assert outcomes == [expected] * size, (size, settings)


def test_a_plain_loader_is_its_data_set() -> None:
    assert train(LOADERS["shuffled"](), global_batch=16) == train(Noisy(), global_batch=16, micro_batch=2)
    assert train(LOADERS["sequential"](), global_batch=16) == train(
        Noisy(), global_batch=16, micro_batch=2, shuffle=False
    )


TENS = torch.arange(10)


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (lambda: DataLoader(TENS, batch_size=4), [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]] * 2),
        (lambda: DataLoader(TENS, batch_size=4, drop_last=True), [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2),
        (lambda: DataLoader(TENS, batch_size=2, sampler=Given([[7, 3, 3], [9, 0, 1, 2]])),
         [[[7, 3], [3]], [[9, 0], [1, 2]]]),
        (lambda: DataLoader(TENS, batch_size=2, sampler=Given([[7, 3, 3], [9, 0, 1, 2]]), drop_last=True),
         [[[7, 3]], [[9, 0], [1, 2]]]),
        (lambda: DataLoader(TENS, batch_sampler=BatchSampler(SequentialSampler(TENS), 4, True)),
         [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2),
        (lambda: DataLoader(TENS.tolist(), batch_size=5, collate_fn=lambda samples: -torch.tensor(samples)),
         [[[0, -1, -2, -3, -4], [-5, -6, -7, -8, -9]]] * 2),
    ],
)  # fmt: skip
def test_the_order_and_the_cut_are_the_loaders(loader: Any, expected: list[Any]) -> None:
    size = loader().batch_sampler.batch_size
    assert numbers(loader(), global_batch=2 * size) == expected
    assert numbers(loader(), global_batch=2 * size, readers=1) == expected
    assert numbers(loader(), global_batch=2 * size, feed="dispatched", readers=1) == expected


@pytest.mark.parametrize("settings", [{}, {"readers": 1}, {"feed": "dispatched"}, {"feed": "dispatched", "readers": 2}])
def test_a_batch_sampler_gives_micro_batches_of_its_own_sizes(settings: dict[str, Any]) -> None:
    batches = [[[1, 2, 3], [4], [5, 6], [0]], [[9], [8, 7]]]
    assert numbers(DataLoader(TENS, batch_sampler=Given(batches)), batches_per_step=2, **settings) == batches


def test_a_step_of_a_batch_sampler_weighs_its_samples() -> None:
    batches = [[[1, 2, 3], [4], [5, 6], [0], [7]], [[9], [8, 7]]]
    loader = DataLoader(TensorDataset(X, Y), batch_sampler=Given(batches))
    assert train(loader, batches_per_step=2)[1] == [4, 3, 1, 3]
    assert train(DataLoader(TensorDataset(X, Y), batch_sampler=Given(batches)), batches_per_step=2, drop_last=True)[
        1
    ] == [4, 3, 3]


def test_a_shuffled_loader_that_drops_its_last_batch_drops_other_samples_each_time() -> None:
    first, second = numbers(DataLoader(TENS, batch_size=4, shuffle=True, drop_last=True), global_batch=8)
    dropped = [set(range(10)) - {i for batch in epoch for i in batch} for epoch in (first, second)]
    assert [len(left) for left in dropped] == [2, 2]
    assert dropped[0] != dropped[1]


def test_only_rank_0_draws(pool: WorkerPool) -> None:
    class OnRank0(Sampler):
        def __len__(self) -> int:
            return 50

        def __iter__(self) -> Iterator[int]:
            assert os.environ.get("RANK", "0") == "0"
            return iter(range(49, -1, -1))

    def outcome() -> Any:
        return train(DataLoader(TensorDataset(X, Y), batch_size=2, sampler=OnRank0()), global_batch=8)

    assert pool.run(outcome, 3) == [outcome()] * 3


@pytest.mark.parametrize("sampler", [
    lambda: SubsetRandomSampler(range(5, 10)),
    lambda: RandomSampler(TENS, replacement=True, num_samples=30, generator=torch.Generator().manual_seed(5)),
    lambda: BatchSampler(SubsetRandomSampler(range(5), generator=torch.Generator()), 3, False),
])  # fmt: skip
def test_an_epochs_order_depends_on_seed_and_epoch_alone(sampler: Any) -> None:
    in_batches = isinstance(sampler(), BatchSampler)
    fresh = Ordered(as_source(TENS), sampler(), seed=3, in_batches=in_batches)
    used = Ordered(as_source(TENS), sampler(), seed=3, in_batches=in_batches)
    torch.manual_seed(0)

    def drawn_from(data: Ordered, epoch: int) -> list[list[int]]:
        return [numbers.tolist() for numbers in data.draw(epoch)]

    expected = [drawn_from(fresh, epoch) for epoch in range(3)]
    torch.manual_seed(1)
    state, drawn = torch.get_rng_state(), {epoch: drawn_from(used, epoch) for epoch in (2, 0, 2, 1)}
    assert [drawn[epoch] for epoch in range(3)] == expected
    assert expected[0] != expected[1]
    assert torch.equal(torch.get_rng_state(), state), "the user's generators go on as if nothing had been drawn"
    assert drawn_from(Ordered(as_source(TENS), sampler(), seed=4, in_batches=in_batches), 0) != expected[0]


def test_a_long_order_is_drawn_in_blocks() -> None:
    """A list of all indices as Python's integers takes 36 bytes or more each, an array 8."""
    length = 200_000

    def bytes_of(in_batches: bool) -> float:
        sampler: Any = [range(i, i + 4) for i in range(0, length, 4)] if in_batches else range(length)
        data = Ordered(as_source(torch.empty(length, 0)), sampler, in_batches=in_batches)
        epochs = epochs_of(data, Steps(length, 4, 1), SingleCommunicator(World()), seed=0, shuffle=False)
        tracemalloc.start()
        epoch = epochs.begin(0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert np.array_equal(epoch.indices(0, length), np.arange(length))
        return peak / length

    assert bytes_of(in_batches=False) < 24
    assert bytes_of(in_batches=True) < 24


@pytest.mark.parametrize("feed_kind", ["sharded", "dispatched"])
@pytest.mark.parametrize("readers", [0, 1])
def test_a_drawn_order_goes_on_where_it_was(readers: int, feed_kind: Any) -> None:
    def steps_from(position: Position, limit: int) -> tuple[list[Any], Position]:
        data = Ordered(as_source(TENS), WeightedRandomSampler([1.0] * 10, 13), seed=1)
        feed = make_feed(
            data, DataSettings(seed=1, shuffle=True, feed=feed_kind, readers=readers), Steps(13, 4, 2),
            lambda left: ranges((min(left, 2),)), SingleCommunicator(World()),
        )  # fmt: skip
        found = []
        for _ in range(limit):
            step = feed.begin_step(position)
            found.append([feed.micro_batch(range(k, k + 1))[0].tolist() for k in step.plan[0]])
            assert step is not None
            position = step.after
        feed.close()
        return found, position

    whole, _ = steps_from(Position(), 8)
    assert [len(step) for step in whole] == [2, 2, 2, 1] * 2
    for cut in (1, 3, 4, 6) if readers == 0 else (3, 5):  # in an epoch, before its last step, at its end
        before, position = steps_from(Position(), cut)
        assert before + steps_from(position, 8 - cut)[0] == whole


def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_with_the_sampler(tmp_path: Any) -> None:
    def run(folder: str | None, num_steps: int) -> str:
        checkpoints = None if folder is None else pl.Checkpoints(folder, every_steps=1)
        loader = LOADERS["weighted"]()
        with pl.Trainer.setup(
            mlp, lambda p: torch.optim.SGD(p, lr=0.1), data=loader, global_batch=16, exact=True, checkpoints=checkpoints
        ) as trainer:
            for epoch in trainer.epochs(2, max_steps=num_steps):
                for batch in epoch:
                    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                    trainer.step()
            return digest(trainer.model.state_dict())

    expected = run(None, 6)
    run(str(tmp_path), 4)
    assert run(str(tmp_path), 6) == expected


# Streams, and items that are batches already.


class Letters(IterableDataset):
    def __init__(self, num_samples: int = 50, size: int | None = None) -> None:
        self.num_samples = num_samples
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        if self.size is None:
            yield from range(self.num_samples)
        else:
            yield from torch.arange(self.num_samples).split(self.size)


def test_an_iterable_data_set_in_a_loader_is_a_stream() -> None:
    loader = DataLoader(Letters(7), batch_size=2, collate_fn=lambda samples: 10 * torch.tensor(samples))
    assert numbers(loader, epochs=1, global_batch=4, num_shards=2) == [[[0, 20], [10, 30], [40, 60], [50]]]
    assert numbers(loader, epochs=1, global_batch=4) == [[[0, 10], [20, 30], [40, 50], [60]]]


@pytest.mark.parametrize("settings", [{}, {"readers": 2}, {"feed": "dispatched"}, {"feed": "sharded", "readers": 1}])
def test_items_that_are_batches_are_micro_batches(settings: dict[str, Any]) -> None:
    expected = [[[0, 1, 2], [3, 4, 5], [6]]] * 2
    items = [torch.tensor(batch) for batch in expected[0]]
    assert numbers(DataLoader(items, batch_size=None), batches_per_step=2, **settings) == expected
    assert numbers(DataLoader(Letters(7, size=3), batch_size=None), batches_per_step=2, **settings) == expected
    reverse = DataLoader(items, batch_size=None, sampler=Given([[2, 0], [1]]), collate_fn=lambda batch: -batch)
    assert numbers(reverse, batches_per_step=2, **settings) == [[[-6], [0, -1, -2]], [[-3, -4, -5]]]


def test_a_dict_or_tuple_in_a_loader_is_a_collection_of_samples() -> None:
    for items in ({i: torch.tensor(i) for i in range(3)}, tuple(torch.arange(3))):
        assert numbers(DataLoader(items, batch_size=2), epochs=1, global_batch=2) == [[[0, 1], [2]]]


def test_a_loader_can_be_evaluated() -> None:
    model = torch.nn.Linear(1, 1)
    with pl.Trainer.setup(model, lambda p: torch.optim.SGD(p, lr=0.1), data=TENS, global_batch=4) as trainer:
        sizes = []
        mean = trainer.evaluate(
            DataLoader(TENS, batch_size=3), lambda _, batch: sizes.append(len(batch)) or batch.float().mean()
        )
        with pytest.raises(ValueError, match="every sample is visited once here, so a DataLoader must"):
            trainer.evaluate(DataLoader(TENS, batch_size=3, drop_last=True), lambda _, batch: batch.float().mean())
        arrays = ArrayLoader(TENS, batch_size=3)
        mean_of_arrays = trainer.evaluate(arrays, lambda _, batch: sizes.append(len(batch)) or batch.float().mean())
        with pytest.raises(ValueError, match="but the ArrayLoader has drop_last=True: leave it out"):
            trainer.evaluate(ArrayLoader(TENS, batch_size=3, drop_last=True), lambda _, batch: batch.float().mean())
    assert (mean, mean_of_arrays, sizes) == (4.5, 4.5, [3, 3, 3, 1] * 2)


# What a loader's settings become.


def test_settings_are_taken_over() -> None:
    loader = DataLoader(Noisy(), batch_size=8, num_workers=2, shuffle=True, drop_last=True)
    adopted = adopt(loader, LoadingOptions(global_batch=16), seed=0)
    assert (adopted.micro_batch, adopted.readers, adopted.shuffle, adopted.feed) == (8, 2, True, "sharded")
    assert isinstance(adopted.data, Ordered)
    assert len(adopted.data) == 48
    in_memory = adopt(DataLoader(TensorDataset(X, Y), batch_size=8, num_workers=2), LoadingOptions(), seed=0)
    assert isinstance(in_memory.data, Columns)
    assert (in_memory.readers, in_memory.shuffle) == (0, False), "processes would only slow indexing down"


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(TENS, replacement=True),
        RandomSampler(TENS, num_samples=7),
        SequentialSampler(range(7)),
        type("Mine", (RandomSampler,), {})(TENS),
    ],
)
def test_samplers_that_do_not_visit_every_sample_once_decide_themselves(sampler: Any) -> None:
    data = adopt(DataLoader(TENS, batch_size=2, sampler=sampler), LoadingOptions(global_batch=4), seed=0).data
    assert isinstance(data, Ordered)
    assert data.sampler is sampler


class Own(DataLoader):
    def __iter__(self) -> Any:
        return iter([])


def loader(**settings: Any) -> DataLoader:
    return DataLoader(Noisy(), **{"batch_size": 4, **settings})


@pytest.mark.parametrize(
    ("data", "settings", "text"),
    [
        (loader(), {"shuffle": True}, "shuffle=True contradicts the DataLoader's shuffle=False: leave one of them out"),
        (loader(shuffle=True), {"shuffle": False}, "shuffle=False contradicts the DataLoader's shuffle=True"),
        (loader(sampler=SubsetRandomSampler([1, 2])), {"shuffle": True},
         "shuffle=True contradicts the DataLoader's SubsetRandomSampler, which decides the order: leave shuffle out"),
        (loader(), {"micro_batch": 2}, "micro_batch=2 contradicts the DataLoader's batch_size=4"),
        (loader(num_workers=2), {"readers": 1}, "readers=1 contradicts the DataLoader's num_workers=2"),
        (loader(collate_fn=list), {"collate_fn": tuple},
         "collate_fn=<class 'tuple'> contradicts the DataLoader's collate_fn=<class 'list'>"),
        (loader(), {"batches_per_step": 2}, "global_batch=8 and batches_per_step=2 both set the size of a step"),
        (loader(), {"batches_per_step": 0, "global_batch": None}, "batches_per_step=0 must be >= 1"),
        (loader(), {"shuffle_buffer": 5}, "shuffle_buffer and num_shards are for streams"),
        (loader(sampler=DistributedSampler(TENS, 2, 0)), {},
         "DistributedSampler gives each worker a part of the data, but Paceline divides the data itself"),
        (loader(worker_init_fn=print), {}, "worker_init_fn, which Paceline's readers do not call"),
        (loader(batch_size=64, drop_last=True), {},
         "drop_last=True leaves nothing of 50 samples with batch_size=64: choose a smaller batch_size"),
        (DataLoader(Noisy(), batch_sampler=ByLength()), {"batches_per_step": 2},
         "global_batch has no effect on a DataLoader with a ByLength, which gives finished batches"),
        (DataLoader(Noisy(), batch_sampler=ByLength()), {"global_batch": None},
         "batches_per_step is missing: set the number of batches of a DataLoader with a ByLength per optimizer step"),
        (DataLoader(Letters(), batch_size=4, drop_last=True), {},
         "drop_last=True over an IterableDataset, but every sample of a stream is trained"),
        (DataLoader(Letters(), batch_size=4), {"shuffle": True}, "streams cannot be shuffled by index"),
        (DataLoader(Letters(), batch_size=4), {"shuffle": False, "shuffle_buffer": 5},
         "shuffle=False contradicts shuffle_buffer=5: leave one out"),
        (DataLoader(Letters(), batch_size=None), {"global_batch": None, "batches_per_step": 2, "shuffle": True},
         "decides the order of its batches, so it cannot be shuffled here"),
        (loader(), {"feed": "dispatched", "prefetch": 3}, "prefetch=3 has no effect on streams and dispatched data"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_names_both_sides(data: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        train(data, **{"global_batch": 8, **settings})


@pytest.mark.parametrize("sampler", [SequentialSampler, RandomSampler])
def test_batches_per_step_with_torchs_own_batch_sampler(sampler: Any, pool: WorkerPool) -> None:
    def outcome() -> Any:
        batches = BatchSampler(sampler(range(50)), 4, drop_last=False)
        return train(DataLoader(TensorDataset(X, Y), batch_sampler=batches), batches_per_step=3)

    whole = train(TensorDataset(X, Y), global_batch=12, micro_batch=4, shuffle=sampler is RandomSampler)
    assert whole[1] == [12, 12, 12, 12, 2] * 2
    assert outcome() == whole
    assert train(DataLoader(TensorDataset(X, Y), 4, shuffle=sampler is RandomSampler), batches_per_step=3) == whole
    for size in (2, 3):
        assert pool.run(outcome, size) == [whole] * size


def test_a_loader_with_an_iteration_of_its_own_is_refused() -> None:
    with pytest.raises(TypeError, match=r"data is a Own, .* pass paceline.Batches\(loader\)"):
        train(Own(Noisy()), global_batch=8)


@pytest.mark.parametrize(
    ("sampler", "in_batches", "text"),
    [
        ([], False, "list gave no samples in epoch 0: it must give at least one sample"),
        ([3, 10], False, "list gave 3 to 10 in epoch 0: it must give sample indices from 0 to 9"),
        ([-1, 4], False, "list gave -1 to 4 in epoch 0"),
        (["a"], False, "list gave 'a' in epoch 0"),
        ([0.5], False, "list gave 0.5 in epoch 0"),
        ([[0], []], True, "list gave an empty batch 1 in epoch 0"),
        ([[0], [11]], True, "list gave 0 to 11 in epoch 0"),
        ([3, 4], False, "list gave 2 samples in epoch 0: it must give at least the 4 of a batch, since .* drop_last"),
    ],
)
def test_what_a_sampler_must_not_give(sampler: Any, in_batches: bool, text: str) -> None:
    data = Ordered(as_source(TENS), sampler, seed=0, in_batches=in_batches, multiple_of=4 if sampler == [3, 4] else 1)
    with pytest.raises(ValueError, match=text):
        epochs_of(data, Steps(2, 2, 1), SingleCommunicator(World()), seed=0, shuffle=False).begin(0)


@pytest.mark.parametrize("way", ["sharded", "dispatched"])
def test_a_position_beyond_the_data_says_that_the_data_changed(way: Any) -> None:
    feed = make_feed(
        as_source(TENS), DataSettings(seed=0, shuffle=True, feed=way), Steps(10, 4, 2),
        lambda left: ranges((min(left, 2),)), SingleCommunicator(World()),
    )  # fmt: skip
    with pytest.raises(
        ValueError, match="is at micro-batch 6 of epoch 1, which has only 5: the data is shorter than before"
    ):
        feed.begin_step(Position(1, 6, 9))


def test_an_empty_stream_is_an_error_not_an_endless_loop(pool: WorkerPool) -> None:
    class Drying(IterableDataset):
        """Dry from the second epoch on."""

        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(0 if self.epoch else 6))

    for readers in (0, 1):
        with pytest.raises(ValueError, match="epoch 1 of the data has no samples: give at least one"):
            numbers(Drying(), global_batch=4, micro_batch=2, readers=readers)
    with pytest.raises(AssertionError, match="epoch 1 of the data has no sample"):
        pool.run(lambda: numbers(Drying(), global_batch=4, micro_batch=2), 2)


@pytest.mark.parametrize(("data", "text"), [
    (object(), "data is a object, which has no __getitem__ and __len__"),
    (5, "data is a int"),
    ((i for i in range(3)), "data is a generator, which can be read only once"),
])  # fmt: skip
def test_unknown_data_is_named(data: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        train(data, global_batch=8)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [4, 4, 2]),  # as in a loop without us
        ({"micro_batch": 2}, [4, 4, 2]),
        ({"global_batch": 8}, [8, 2]),
    ],
)
def test_a_loaders_batch_is_a_step_unless_the_step_is_given(settings: dict[str, int], expected: list[int]) -> None:
    data = DataLoader(TensorDataset(torch.arange(10.0).reshape(10, 1)), batch_size=4)
    sizes: list[int] = []
    steps: list[int] = []
    with pl.Trainer.setup(
        torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1), data=data, **grouped(**settings)
    ) as trainer:
        trainer.every(1, lambda record: steps.append(record.num_samples))
        for epoch in trainer.epochs(1):
            for (x,) in epoch:
                sizes.append(len(x))
                trainer.backward(trainer.model(x).mean())
                trainer.step()
    assert steps == expected
    assert max(sizes) == settings.get("micro_batch", 4)


class Counted(IterableDataset):
    """A stream of 32 samples that counts the samples it gives; with `num_shards`, one that divides itself."""

    def __init__(self, samples: Sequence[int] = range(32)) -> None:
        self.samples = samples
        self.num_read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for sample in self.samples:
            self.num_read += 1
            yield torch.tensor([float(sample)])


class Divisible(Counted):
    num_shards = 4

    def shard(self, num_shards: int, index: int) -> Counted:
        return Counted(self.samples[index::num_shards])


@pytest.mark.parametrize(
    ("stream", "settings", "expected"),
    [
        pytest.param(Counted, {}, [32, 0], id="read once, by rank 0"),
        pytest.param(Counted, {"feed": "sharded"}, [32, 32], id="every worker reads all of it on request"),
        pytest.param(Divisible, {}, [0, 0], id="divided by its own shard"),
    ],
)
def test_a_stream_that_cannot_be_divided_is_read_once(
    stream: type[Counted], settings: dict[str, Any], expected: list[int], pool: WorkerPool
) -> None:
    def num_read() -> int:
        data = stream()
        model = torch.nn.Linear(1, 1)
        with pl.Trainer.setup(
            model, torch.optim.SGD, data=data, global_batch=8, micro_batch=2, **grouped(shares="equal", **settings)
        ) as trainer:
            for batch in next(trainer.epochs(1)):
                trainer.backward(trainer.model(batch).mean())
                trainer.step()
        return data.num_read

    assert pool.run(num_read, 2) == expected
