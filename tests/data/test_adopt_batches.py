"""Batches that are made elsewhere, data that lies on the device, and samples that cannot be read."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler
from training import train
from worker_pool import WorkerPool

import paceline as pl
from paceline.data.sources.base import Columns
from paceline.data.sources.batches import num_samples_of
from paceline.data.sources.skip_bad import Skipped
from paceline.data.sources.streams import BatchStream

X, Y = vectors(50)
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


class Foreign:
    """A loader of another library: noisy batches of one to four samples, in an order that it draws itself."""

    def __init__(self, rows: range = range(50)) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        order = random.sample(list(self.rows), len(self.rows))
        while order:
            size = random.randint(1, 4)
            rows, order = order[:size], order[size:]
            yield [X[rows] + 0.1 * torch.rand(()), Y[rows]]


def numbers(data: Any, epochs: int = 1, **settings: Any) -> list[list[int]]:
    """The micro-batches of numbers that one worker sees, one after another."""
    with pl.Trainer.setup(
        lambda: torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1), data=data, **grouped(**settings)
    ) as trainer:
        seen = []
        for epoch in trainer.epochs(epochs):
            for batch in epoch:
                seen.append(batch.tolist())
                trainer.backward(trainer.model(batch.float().reshape(-1, 1)).mean())
                trainer.step()
    return seen


def test_batches_give_the_same_weights_whoever_reads_them(pool: WorkerPool) -> None:
    expected = train(pl.Batches(Foreign()), batches_per_step=6)
    assert sum(expected[1]) == 100
    for size, settings in [
        (2, {}),
        (3, {"readers": 2}),
        (2, {"feed": "sharded"}),
        (3, {"feed": "sharded", "readers": 1}),
    ]:
        outcomes = pool.run(
            lambda settings: train(pl.Batches(Foreign()), batches_per_step=6, **settings), size, settings
        )
        assert outcomes == [expected] * size, (size, settings)


def test_rank_0_alone_reads_batches(pool: WorkerPool) -> None:
    def batches() -> Iterator[Any]:
        assert os.environ.get("RANK", "0") == "0"
        yield from zip(X.split(5), Y.split(5), strict=True)

    assert pool.run(lambda: train(pl.Batches(batches), batches_per_step=4), 2)[1][1] == [20, 20, 10] * 2


def test_batches_come_in_their_own_order() -> None:
    split = [[0, 1, 2], [3], [4, 5], [6, 7]]
    batches = [torch.tensor(batch) for batch in split]
    assert numbers(pl.Batches(batches), batches_per_step=3) == split
    assert numbers(pl.Batches(lambda: iter(batches)), epochs=2, batches_per_step=3) == split * 2


def test_iterables_of_one_worker_each_are_shards_of_every_step(pool: WorkerPool) -> None:
    first, second = [torch.tensor([i]) for i in range(5)], [torch.tensor([i, i]) for i in range(10, 14)]
    # Four batches per step: two of each, those of the first iterable before those of the second.
    expected = [[0], [1], [10, 10], [11, 11], [2], [3], [12, 12], [13, 13], [4]]
    assert numbers(pl.PerWorker([first, second]), batches_per_step=4) == expected
    assert numbers(pl.PerWorker([first, second]), batches_per_step=4, feed="dispatched", readers=2) == expected

    def per_worker() -> pl.PerWorker:
        return pl.PerWorker([Foreign(range(20)), Foreign(range(20, 50))])

    whole = train(per_worker(), batches_per_step=4)
    assert sum(whole[1]) == 100
    for size, settings in [(2, {}), (3, {"readers": 2}), (2, {"feed": "dispatched"})]:
        outcomes = pool.run(lambda settings: train(per_worker(), batches_per_step=4, **settings), size, settings)
        assert outcomes == [whole] * size, (size, settings)


def test_iterables_do_not_draw_the_same_numbers() -> None:
    def noise() -> Iterator[torch.Tensor]:
        for _ in range(3):
            yield torch.rand(1)

    drawn = numbers(pl.PerWorker([noise, noise]), epochs=2, batches_per_step=2)
    assert len({value for (value,) in drawn}) == 12


def test_each_of_as_many_workers_reads_its_own_iterable_alone(pool: WorkerPool) -> None:
    def own(rank: int) -> Any:
        def batches() -> Iterator[Any]:
            assert os.environ["RANK"] == str(rank)
            yield from zip(X.split(5), Y.split(5), strict=True)

        return batches

    def outcome() -> Any:
        return train(pl.PerWorker([own(0), own(1)]), batches_per_step=4, shares="equal")

    assert pool.run(outcome, 2)[0][1] == [20] * 10


def test_a_resumed_stream_of_batches_goes_on(tmp_path: Any) -> None:
    def run(folder: Any, num_steps: int) -> str:
        checkpoints = None if folder is None else pl.Checkpoints(folder, every_steps=1)
        with pl.Trainer.setup(
            mlp, lambda p: torch.optim.SGD(p, lr=0.1), data=pl.Batches(Foreign()), exact=True,
            batching=pl.Batching(batches_per_step=4), checkpoints=checkpoints,
        ) as trainer:  # fmt: skip
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                    trainer.step()
                    if trainer.position.step == num_steps:
                        return digest(trainer.model.state_dict())
        raise AssertionError("too few steps")

    expected = run(None, 8)
    run(tmp_path, 3)
    assert run(tmp_path, 8) == expected


@dataclass
class Records:
    name: str
    rows: Any


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(4), torch.zeros(4, 2)], 4),
        ((torch.zeros(4), ["a", "b", "c", "d"]), 4),
        ({"text": ["a", "b"], "ids": np.zeros((2, 5))}, 2),
        (Records("x", torch.zeros(6)), 6),
    ],
)
def test_a_batch_weighs_its_rows(batch: Any, count: int) -> None:
    assert num_samples_of(batch) == count


def test_the_user_may_weigh_batches_that_hold_no_tensor() -> None:
    weights = []
    with pl.Trainer.setup(
        torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1), data=pl.Batches(["ab", "cde"]),
        batching=pl.Batching(batches_per_step=2), weight_fn=len,
    ) as trainer:  # fmt: skip
        trainer.every(1, lambda record: weights.append(record.weight))
        for epoch in trainer.epochs(1):
            for _ in epoch:
                trainer.backward(trainer.model(torch.ones(1, 1)).sum())
                trainer.step()
    assert weights == [5]


@pytest.mark.parametrize(
    ("batches", "error", "text"),
    [
        (["ab"], TypeError, "cannot count the samples of a batch: it is a str without rows: set weight_fn"),
        ([torch.tensor(3)], TypeError, "cannot count the samples of a batch: it is a Tensor without rows"),
        ([(torch.zeros(9), torch.zeros(2))], TypeError, r"differ in their number of rows \(batch.x: shape \(9,\), "),
        ([torch.zeros(0, 2)], ValueError, "a batch has no sample, since its tensors have no rows"),
        ([], ValueError, "epoch 0 of the data has no samples: give at least one"),
    ],
)
def test_batches_that_cannot_be_trained(batches: list[Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        train(pl.Batches(batches), batches_per_step=2)
    assert not batches or "while converting micro-batch 0 of epoch 0" in caught.value.__notes__


def test_an_error_in_an_iterable_names_the_batch() -> None:
    def broken() -> Iterator[Any]:
        yield X[:2], Y[:2]
        raise OSError("rotten")

    with pytest.raises(OSError, match="rotten") as caught:
        train(pl.Batches(broken), batches_per_step=2)
    assert "while reading batch 1 of the stream in epoch 0" in caught.value.__notes__


@pytest.mark.parametrize(
    ("make", "settings", "error", "text"),
    [
        (lambda: pl.Batches(iter([])), {}, TypeError, "Batches got a list_iterator, which can be read only once"),
        (lambda: pl.Batches(3), {}, TypeError, "Batches got a int, which is not iterable: pass a function that"),
        (lambda: pl.PerWorker([]), {}, ValueError, "PerWorker got no iterables: give one per worker"),
        (lambda: pl.PerWorker([[], (i for i in [])]), {}, TypeError, "PerWorker got a generator, which can be read"),
        (lambda: pl.PerWorker([[], []]), {"batches_per_step": 5}, ValueError,
         "batches_per_step=5 is not a multiple of the 2 iterables of PerWorker: choose 4 or 6"),
        (lambda: pl.PerWorker([[], []]), {"batches_per_step": 1}, ValueError, "choose 2"),
        (lambda: pl.Batches([]), {"batches_per_step": None}, ValueError, "batches_per_step is missing"),
        (lambda: pl.Batches([]), {"micro_batch": 4}, ValueError, "micro_batch has no effect on Batches"),
        (lambda: pl.Batches([]), {"physical_batch": 4}, ValueError, "physical_batch has no effect on Batches"),
        (lambda: pl.Batches([]), {"shuffle": True}, ValueError, "Batches decides the order of its batches"),
        (lambda: pl.Batches([]), {"shuffle_buffer": 9}, ValueError, "Batches decides the order of its batches"),
        (lambda: pl.Batches([]), {"resident": True}, ValueError, "resident needs data with numbered samples"),
        (lambda: pl.Batches([]), {"skip_bad_samples": True}, ValueError, "skip_bad_samples needs data with numbered"),
    ],
)  # fmt: skip
def test_what_batches_cannot(make: Any, settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        train(make(), **{"batches_per_step": 4, **settings})


# Data that lies on the device.


def test_resident_data_gives_the_same_weights() -> None:
    expected = train((X, Y), global_batch=16, micro_batch=2)
    assert train((X, Y), global_batch=16, micro_batch=2, resident=True) == expected
    loader = DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True, num_workers=1)
    assert train(loader, global_batch=16, resident=True) == expected


def test_columns_move_to_the_device_and_keep_their_form() -> None:
    rows = np.arange(3)
    for form in ({"x": X, "y": Y}, (X, Y), (X,), X):
        before, after = (c.read(rows, 0, 0) for c in (Columns(form), Columns(form).on(CPU)))
        assert digest(before) == digest(after)
        assert type(before) is type(after)


def test_data_that_does_not_fit_says_what_it_needs_and_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 << 29, 1 << 40))
    rows = torch.empty(1, dtype=torch.float32).expand(1 << 29)
    text = "resident=True needs 2.00 GiB on cuda:0 for the data, but only 1.50 GiB are free: leave it out"
    with pytest.raises(MemoryError, match=re.escape(text)):
        Columns(rows).on(GPU)


@pytest.mark.parametrize(
    ("data", "settings", "text"),
    [
        (list(zip(X, Y, strict=True)), {}, "resident=True needs data as whole columns .*, not a list: leave it out"),
        (DataLoader([1, 2], batch_size=2), {}, "not a list"),
        (set(range(5)), {}, "not a set"),
        ((X, Y), {"readers": 1}, "readers has no effect with resident=True"),
        ((X, Y), {"skip_bad_samples": True}, "skip_bad_samples has no effect with resident=True"),
        ((X, Y), {"feed": "dispatched"}, "feed has no effect with resident=True"),
    ],
)
def test_what_cannot_be_resident(data: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        train(data, global_batch=2, resident=True, **settings)


# Samples that cannot be read.


class Rotten:
    """Every seventh sample fails."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index % 7 == 0:
            raise OSError(f"sample {index} is rotten")
        return X[index], Y[index]


def test_bad_samples_are_left_out_the_same_way_everywhere(pool: WorkerPool) -> None:
    def outcome(settings: dict[str, Any]) -> Any:
        skipped: list[Skipped] = []
        return train(Rotten(), global_batch=16, micro_batch=2, skip_bad_samples=skipped.append, **settings), {
            one.index for one in skipped
        }

    expected, told = outcome({})
    assert sum(expected[1]) == 2 * 42
    assert told == set(range(0, 50, 7))
    for size, settings in [(1, {"readers": 2}), (2, {}), (3, {"readers": 2}), (2, {"feed": "dispatched"})]:
        outcomes = pool.run(outcome, size, settings)
        assert [weights for weights, _ in outcomes] == [expected] * size, (size, settings)
        assert set.union(*[indices for _, indices in outcomes]) == told


def test_without_a_callback_bad_samples_are_warned_of() -> None:
    sampler = WeightedRandomSampler([1.0] * 50, 20)
    with pytest.warns(UserWarning, match=r"sample \d+ was skipped: sample \d+ is rotten"):
        train(DataLoader(Rotten(), batch_size=2, sampler=sampler), global_batch=4, skip_bad_samples=True)
    with pytest.raises(OSError, match="is rotten"):
        train(Rotten(), global_batch=16, skip_bad_samples=False)


@pytest.mark.parametrize("data", [{1, 2}, DataLoader([X], batch_size=None)])
def test_bad_samples_need_numbers(data: Any) -> None:
    size = {"batches_per_step": 1} if isinstance(data, DataLoader) else {"global_batch": 2}
    with pytest.raises(ValueError, match="skip_bad_samples needs data with numbered samples"):
        train(data, skip_bad_samples=True, **size)


def test_the_parts_of_a_loader_know_the_epoch() -> None:
    class ByEpoch(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([self.epoch, self.epoch + 1])

    stream = BatchStream(pl.Batches(DataLoader(range(10), 2, sampler=ByEpoch())).iterables, seed=0)
    assert [[batch.tolist() for batch in stream.open(0, 1, epoch)] for epoch in (0, 4)] == [[[0, 1]], [[4, 5]]]
