"""Loaders for loops that Paceline does not run: over arrays, and for several devices of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from grouping import grouped
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import paceline as pl

CPU = torch.device("cpu")
ROWS = np.arange(10)


# Arrays.


def test_an_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    loader = pl.data.ArrayLoader(ROWS, 10 * ROWS, batch_size=4)
    assert loader.n_batches == len(loader) == 3
    epochs = [list(loader), list(loader.epoch())]
    for batches in epochs:
        assert [len(batch.x) for batch in batches] == [4, 4, 2]
        assert sorted(i for batch in batches for i in batch.x.tolist()) == ROWS.tolist()
        assert all(torch.equal(batch.y, 10 * batch.x) for batch in batches)
    assert [b.x.tolist() for b in epochs[0]] != [b.x.tolist() for b in epochs[1]]
    again = pl.data.ArrayLoader(ROWS, batch_size=4)
    assert [b.x.tolist() for b in again] == [b.x.tolist() for b in epochs[0]]
    assert [b.x.tolist() for b in pl.data.ArrayLoader(ROWS, batch_size=4, seed=1)] != [b.x.tolist() for b in epochs[0]]


def test_batches_can_be_taken_one_by_one() -> None:
    loader = pl.data.ArrayLoader(ROWS, batch_size=4, shuffle=False)
    taken = []
    while loader.has_next():
        taken.append(loader.next_batch())
    assert [batch.x.tolist() for batch in taken] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert taken[0].y is None
    with pytest.raises(pl.errors.MisuseError, match=r"all 3 batches of the epoch were taken: call reset\(\)"):
        loader.next_batch()
    loader.reset()
    assert loader.next_batch().x.tolist() == [0, 1, 2, 3]
    assert [len(batch.x) for batch in loader] == [4, 4, 2], "iterating is an epoch of its own"
    assert loader.next_batch().x.tolist() == [4, 5, 6, 7]


def test_the_last_batch_is_kept_unless_asked() -> None:
    assert [len(b.x) for b in pl.data.ArrayLoader(ROWS, batch_size=4, drop_last=True)] == [4, 4]
    assert [len(b.x) for b in pl.data.ArrayLoader(ROWS, batch_size=64)] == [10]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"x": ROWS, "batch_size": 0}, ValueError, "batch_size=0 must be an integer >= 1"),
        ({"x": ROWS, "batch_size": 64, "drop_last": True}, ValueError,
         "drop_last=True leaves no batch of 10 rows with batch_size=64: choose batch_size <= 10"),
        ({"x": ROWS, "y": ROWS[:3]}, ValueError, r"the columns of data have \[10, 3\] rows"),
        ({"x": ROWS[:0]}, ValueError, "x has no rows"),
        ({"x": [1, 2]}, TypeError, "x is a list: give an array or tensor"),
        ({"x": ROWS, "y": [1]}, TypeError, "y is a list: give an array or tensor"),
    ],
)  # fmt: skip
def test_bad_arrays_are_named(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        pl.data.ArrayLoader(**arguments)


def test_a_run_takes_an_array_loader() -> None:
    def train(data: Any, **settings: Any) -> torch.Tensor:
        with pl.Trainer.setup(
            lambda: torch.nn.Linear(3, 1),
            lambda p: torch.optim.SGD(p, lr=0.1),
            data=data,
            global_batch=8,
            **grouped(**settings),
        ) as trainer:
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    trainer.backward(functional.mse_loss(trainer.model(batch.x), batch.y))
                    trainer.step()
            return trainer.model.weight.detach()

    x = torch.randn(21, 3)
    y = x.sum(1, keepdim=True)
    expected = train((x, y), micro_batch=4)
    assert torch.equal(train(pl.data.ArrayLoader(x, y, batch_size=4)), expected)
    assert not torch.equal(train(pl.data.ArrayLoader(x, y, batch_size=4, drop_last=True)), expected)
    with pytest.raises(ValueError, match="micro_batch=8 contradicts the ArrayLoader's batch_size=4"):
        train(pl.data.ArrayLoader(x, y, batch_size=4), micro_batch=8)
    with pytest.raises(ValueError, match="collate_fn joins samples, but data is given as whole columns"):
        train(pl.data.ArrayLoader(x, y, batch_size=4), loading=pl.Loading(collate_fn=list))


# Several devices.


class Numbers:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def lists(step: tuple[Any, ...]) -> list[Any]:
    return [None if batch is None else batch.tolist() for batch in step]


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (torch.arange(10), {"batch_size": 2}),
        (Numbers(), {"batch_size": 2}),
        (Numbers(), {"batch_size": 2, "readers": 0}),
        (DataLoader(Numbers(), batch_size=2), {}),
    ],
)
def test_every_device_gets_a_batch_in_every_step(data: Any, settings: dict[str, Any]) -> None:
    settings = settings if isinstance(data, DataLoader) else {"shuffle": False, **settings}
    with pl.compat.resnetimagenet.DataParallelDataLoader(data, [CPU] * 3, **settings) as loader:
        assert len(loader) == 2
        for _ in range(2):
            assert [lists(step) for step in loader] == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], None]]


def test_batches_are_on_their_devices() -> None:
    with pl.compat.resnetimagenet.DataParallelDataLoader(torch.arange(10), ["cpu", "meta"], 3) as loader:
        assert [[batch.device.type for batch in step] for step in loader] == [["cpu", "meta"]] * 2


def test_epochs_are_shuffled_anew_and_an_abandoned_one_is_over() -> None:
    with pl.compat.resnetimagenet.DataParallelDataLoader(Numbers(), [CPU, CPU], 2) as loader:
        next(iter(loader))
        second, third = [list(map(lists, loader)) for _ in range(2)]
    assert second != third
    with pl.compat.resnetimagenet.DataParallelDataLoader(Numbers(), [CPU, CPU], 2) as loader:
        assert [list(map(lists, loader)) for _ in range(2)][1] == second
    for epoch in (second, third):
        assert sorted(i for step in epoch for batch in step if batch for i in batch) == list(range(10))


def test_drop_last_leaves_out_a_smaller_step() -> None:
    with pl.compat.resnetimagenet.DataParallelDataLoader(
        torch.arange(10), [CPU] * 3, 2, shuffle=False, drop_last=True
    ) as loader:
        assert [lists(step) for step in loader] == [[[0, 1], [2, 3], [4, 5]]]


def test_streams_and_iterables_of_batches_feed_devices_too() -> None:
    with pl.compat.resnetimagenet.DataParallelDataLoader(Stream(), [CPU, CPU], 1) as loader:
        assert [lists(step) for step in loader] == [[[0], [1]], [[2], [3]], [[4], None]]
        with pytest.raises(TypeError, match="the number of steps of a stream is not known in advance"):
            len(loader)
    mine = [[torch.tensor([i]) for i in range(3)], [torch.tensor([i, i]) for i in range(10, 13)]]
    with pl.compat.resnetimagenet.DataParallelDataLoader(pl.PerWorker(mine), [CPU, CPU]) as loader:
        assert [lists(step) for step in loader] == [[[0], [10, 10]], [[1], [11, 11]], [[2], [12, 12]]]


@pytest.mark.parametrize(
    ("data", "settings", "text"),
    [
        (Numbers(), {}, "batch_size is missing: give the number of samples per device and step"),
        (Numbers(), {"devices": [CPU], "batch_size": "4"}, "batch_size='4' must be an int"),
        (Numbers(), {"devices": [], "batch_size": 2}, "devices is empty"),
        (pl.PerWorker([[], []]), {"devices": ["cpu"]}, "PerWorker has 2 iterables for 1 devices: give one per device"),
        (Stream(), {"batch_size": 2, "drop_last": True}, "drop_last=True needs data with numbered samples"),
    ],
)
def test_what_devices_cannot_be_fed(data: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pl.compat.resnetimagenet.DataParallelDataLoader(data, **settings)
