"""What a data set may be made of, and may do: it works, or an error says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from grouping import grouped
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.data.errors import SampleError

BAD = 7


def train(data: Any, x_of: Any = None, **settings: Any) -> list[float]:
    """What each of six steps weighs."""
    weights: list[float] = []
    settings = {"global_batch": 8, "micro_batch": 2, "quiet": True, **settings}
    with pl.Trainer.setup(
        lambda: nn.Linear(3, 1), lambda p: torch.optim.SGD(p, lr=0.1), data=data, **grouped(**settings)
    ) as run:
        run.every(1, lambda record: weights.append(record.weight))
        for epoch in run.epochs(max_steps=6):
            for batch in epoch:
                run.backward(run.model(batch if x_of is None else x_of(batch)).sum())
                run.step()
    return weights


class Raising(Dataset):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD:
            raise self.error
        return torch.zeros(3)


class RaisingTogether(Raising):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[i] for i in indices]


class RaisingSource:
    def __len__(self) -> int:
        return 20

    def read(self, indices: Any, epoch: int, position: int) -> Any:
        raise StopIteration


class Lines(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.zeros(20, 3))


class Interrupted(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(3)
        raise KeyboardInterrupt


def stop(_: Any) -> Any:
    return next(iter([]))


class Unready(IterableDataset):
    is_ready = True  # making a stream asks whether it starts again

    def __iter__(self) -> Iterator[Any]:
        if not self.is_ready:
            raise StopIteration
        self.is_ready = False
        return iter([])


class UnreadySampler(Unready):
    is_ready = False

    def __len__(self) -> int:
        return 20


READING = [{}, {"readers": 1}, {"feed": "dispatched"}, {"feed": "dispatched", "readers": 1}]


@pytest.mark.parametrize("settings", READING, ids=str)
@pytest.mark.parametrize("data", [Raising, RaisingTogether])
def test_stop_iteration_in_a_data_set_is_an_error_that_names_the_sample(data: Any, settings: dict[str, Any]) -> None:
    what = r"samples \[.*7.*\]" if data is RaisingTogether else f"sample {BAD}"
    with pytest.raises(SampleError, match=f"reading {what} of the data set raised StopIteration"):
        train(data(StopIteration()), **settings)


@pytest.mark.parametrize("settings", READING, ids=str)
def test_stop_iteration_in_other_code_of_the_user(settings: dict[str, Any]) -> None:
    with pytest.raises(SampleError, match=r"joining samples \[.*\] of the data set to a micro-batch raised StopIt"):
        train(list(torch.zeros(20, 3)), collate_fn=stop, **settings)
    with pytest.raises(SampleError, match=r"joining samples \[0, 1\] of the data set to a micro-batch raised StopIt"):
        train(Lines(), collate_fn=stop, **settings)
    with pytest.raises(SampleError, match=r"reading samples \[.*\] raised StopIteration"):
        train(RaisingSource(), **settings)
    with pytest.raises(SampleError, match="weight_fn raised StopIteration"):
        train(torch.zeros(20, 3), weight_fn=stop, **settings)
    with pytest.raises(SampleError, match="starting the stream in epoch 0 raised StopIteration"):
        train(Unready(), **settings)
    with pytest.raises(SampleError, match="drawing from the sampler UnreadySampler in epoch 0 raised StopIteration"):
        train(DataLoader(torch.zeros(20, 3), 2, sampler=UnreadySampler()), **settings | {"micro_batch": None})


@pytest.mark.parametrize("size", [2, 3])
def test_stop_iteration_on_one_of_several_workers(size: int, pool: WorkerPool) -> None:
    with pytest.raises(WorkersFailed) as caught:
        pool.run(lambda: train(Raising(StopIteration()), shuffle=False), size)
    assert any(isinstance(error, SampleError) for error in caught.value.errors.values())


@pytest.mark.parametrize("settings", READING, ids=str)
def test_a_keyboard_interrupt_in_a_data_set_is_one(settings: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        train(Raising(KeyboardInterrupt()), **settings)
    assert f"while reading sample {BAD} of the data set" in caught.value.__notes__
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(), **settings)
    with pytest.raises(KeyboardInterrupt):
        train(Raising(KeyboardInterrupt()), skip_bad_samples=True, **settings)


class Long(Dataset):
    """Too long for anything to be made of its length."""

    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


@pytest.mark.parametrize("settings", [{}, {"shuffle": False}, *READING[1:]], ids=str)
def test_a_data_set_of_a_trillion_samples(settings: dict[str, Any], pool: WorkerPool, tmp_path: Any) -> None:
    def outcome() -> list[float]:
        checkpoints = pl.Checkpoints(tmp_path / str(torch.distributed.is_initialized()), every_steps=2)
        return train(Long(), lambda x: x / 1e12, checkpoints=checkpoints, **settings)

    assert outcome() == [8] * 6
    assert train(DataLoader(Long(), 2, shuffle=True), lambda x: x / 1e12, micro_batch=None) == [8] * 6
    assert pool.run(outcome, 2) == [[8] * 6] * 2


@pytest.mark.parametrize(
    ("data", "x_of", "weights"),
    [
        (["a", "bb", "ccc"] * 4, lambda batch: torch.tensor([[len(t), 0, 0] for t in batch]).float(), [8, 4] * 3),
        ([{"x": torch.zeros(3), "in": {"text": "a", "sizes": [1, 2]}}] * 12, lambda batch: batch["x"], [8, 4] * 3),
        ([torch.zeros(3)], None, [1] * 6),
        (torch.zeros(1, 3), None, [1] * 6),
        ({"x": torch.zeros(1, 3)}, lambda batch: batch["x"], [1] * 6),
    ],
)
def test_ordinary_samples(data: Any, x_of: Any, weights: list[int], pool: WorkerPool) -> None:
    assert train(data, x_of) == weights
    assert train(data, x_of, readers=1) == weights
    for size in (2, 3):
        assert pool.run(lambda: train(data, x_of), size) == [weights] * size


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([None] * 12, r"sample \d+ of the data set is None, which cannot be joined to a micro-batch: return a sample"),
        ([torch.zeros(3)] * 11 + [None], "sample 11 of the data set is None.*or raise an error in the data set"),
    ],
)
def test_samples_that_are_none(data: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        train(data)


@pytest.mark.filterwarnings("ignore:collate_fn left no sample")
def test_samples_that_are_none_and_a_collate_function_that_drops_them(pool: WorkerPool) -> None:
    def stacked(samples: list[Any]) -> Any:
        kept = [sample for sample in samples if sample is not None]
        return torch.stack(kept) if kept else None

    data = [torch.zeros(3)] * 9 + [None, None, None]
    for size in (1, 2, 3):
        assert pool.run(lambda: train(data, collate_fn=stacked, shuffle=False), size) == [[8, 1] * 3] * size


@pytest.mark.parametrize("data", [torch.zeros(20, 3), Lines()])
def test_a_step_of_more_micro_batches_than_can_be_exchanged(data: Any) -> None:
    text = "global_batch=4000000000000000 with micro_batch=2 makes a step of 2000000000000000 micro-batches, more than"
    with pytest.raises(ValueError, match=f"{text} 1048576: choose global_batch <= 2097152, or a larger micro_batch"):
        train(data, global_batch=4 * 10**15)
    with pytest.raises(
        ValueError, match=r"is not a multiple of micro_batch=30000000000001: choose global_batch=\d+ or"
    ):
        train(data, global_batch=4 * 10**15, micro_batch=3 * 10**13 + 1)
    assert train(data, global_batch=4 * 10**15, micro_batch=None) == [20] * 6
