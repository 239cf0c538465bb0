"""trainer.predict: every sample once, in the data's order, the same on any number of workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.data.sources.base import as_source
from paceline.data.sources.skip_bad import SkipBad

TRAIN, TEST = vectors(16), vectors(23, seed=9)


def setup(model: Any = mlp, **settings: Any) -> pl.Trainer:
    settings = {"data": TRAIN, "global_batch": 8, "micro_batch": 4, "quiet": True, **settings}
    return pl.Trainer.setup(model, lambda params: torch.optim.SGD(params, lr=0.1), **grouped(**settings))


def predict(data: Any, fn: Callable[[Any, Any], Any] | None = None, **settings: Any) -> Any:
    """Of an untrained model, in the world this process is in."""
    with setup() as trainer:
        return trainer.predict(data, fn, **settings)


@pytest.mark.parametrize("num_samples", [1, 5, 23])
def test_the_same_bits_in_the_datas_order_on_any_number_of_workers(num_samples: int, pool: WorkerPool) -> None:
    data = TEST[0][:num_samples]
    with setup() as trainer, torch.no_grad():
        expected = torch.cat([trainer.model(part) for part in data.split(4)])
        alone = trainer.predict(data)
    assert torch.equal(alone, expected)
    assert alone.shape == (num_samples, 4)
    for size in (2, 3):
        assert all(torch.equal(each, expected) for each in pool.run(lambda: predict(data), size))


def test_of_pairs_the_model_gets_the_inputs() -> None:
    assert torch.equal(predict(TEST), predict(TEST[0]))


@dataclass(frozen=True)
class Found:
    scores: torch.Tensor
    names: list[str]
    extra: torch.Tensor | None = None


def structured(_: Any, batch: torch.Tensor) -> dict[str, Any]:
    names = [f"sample {number}" for number in batch.tolist()]
    return {"found": Found(batch * 2, names), "pair": (batch[:, None].float(), batch.bool())}


def test_nested_outputs_are_joined_leaf_by_leaf(pool: WorkerPool) -> None:
    def check(num_samples: int) -> None:
        everything = torch.arange(num_samples)
        outputs = predict(everything, structured)
        assert outputs["found"].scores.tolist() == (everything * 2).tolist()
        assert outputs["found"].names == [f"sample {number}" for number in range(num_samples)]
        assert outputs["found"].extra is None
        column, is_set = outputs["pair"]
        assert torch.equal(column, everything[:, None].float())
        assert is_set.dtype == torch.bool
        assert is_set.tolist() == everything.bool().tolist()

    check(23)
    pool.run(check, 2, 23)
    pool.run(check, 3, 4)  # two workers without a micro-batch of their own


def test_rows_of_unequal_shape_come_back_as_a_list(pool: WorkerPool) -> None:
    def lengths() -> list[tuple[int, ...]]:
        # Micro-batches padded to their own longest: 4 columns in the first, 8 in the second, ...
        outputs = predict(torch.arange(23), lambda _, batch: batch[:, None].expand(-1, int(batch[-1]) + 1))
        assert isinstance(outputs, list)
        assert [int(row[0]) for row in outputs] == list(range(23))
        return [tuple(row.shape) for row in outputs]

    expected = [(min(4 * (n // 4) + 4, 23),) for n in range(23)]
    assert lengths() == expected
    assert pool.run(lengths, 3) == [expected] * 3


def test_lists_may_hold_anything_that_can_travel(pool: WorkerPool) -> None:
    def boxes() -> list[Any]:
        outputs = predict(torch.arange(9), lambda _, batch: [{"box": torch.ones(n, 2)} for n in batch.tolist()])
        return [item["box"].shape[0] for item in outputs]

    assert boxes() == list(range(9))
    assert pool.run(boxes, 2) == [list(range(9))] * 2


@pytest.mark.parametrize(
    ("fn", "error", "text"),
    [
        (lambda *_: torch.tensor(1.0), ValueError, "fn returned a tensor of shape () for a micro-batch of 4 samples"),
        (lambda *_: (torch.ones(3, 2),), ValueError, "a tensor of shape (3, 2) for a micro-batch of 4 samples"),
        (lambda *_: {"names": ["a"]}, ValueError, "fn returned a list of 1 items for a micro-batch of 4 samples"),
        (lambda *_: 3.0, TypeError, "fn returned a float: it must return tensors with a row"),
        (lambda _, b: b.numpy(), TypeError, "fn returned a ndarray: it must return tensors with a row"),
        (
            lambda _, b: b if b[0] else (b, b),
            ValueError,
            "fn returned outputs of different structure",
        ),
    ],
)
def test_outputs_that_have_no_row_per_sample_are_refused(fn: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        predict(torch.arange(23), fn)


def test_outputs_of_different_structure_on_two_workers_are_refused(pool: WorkerPool) -> None:
    def by_half(_: Any, batch: Any) -> Any:
        return (batch, batch) if batch[0] < 12 else (batch,)

    with pytest.raises(WorkersFailed, match="fn returned outputs of different structure"):
        pool.run(lambda: predict(torch.arange(24), by_half), 2)


def test_the_model_is_in_evaluation_mode_and_nothing_is_left_of_it() -> None:
    with setup(lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))) as trainer:
        before = digest(trainer.model.state_dict())
        torch.manual_seed(0)
        outputs = trainer.predict(TEST[0])
        drawn = torch.rand(3)
        assert torch.equal(outputs, trainer.predict(TEST[0]))
        assert trainer.model.training
        assert digest(trainer.model.state_dict()) == before
        assert not outputs.requires_grad
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3))


def test_the_default_runs_in_the_runs_precision() -> None:
    with setup(precision="bf16") as trainer:
        assert trainer.predict(TEST[0]).dtype == torch.bfloat16
        assert trainer.predict(TEST[0], lambda model, x: model(x)).dtype == torch.float32


def test_micro_batch_and_collate_function_are_as_in_evaluation() -> None:
    sizes: list[int] = []

    def record(_: Any, batch: Any) -> torch.Tensor:
        sizes.append(len(batch))
        return batch

    predict(torch.arange(23), record, micro_batch=10)
    predict(DataLoader(TensorDataset(TEST[0]), batch_size=16), lambda _, batch: record(_, batch[0]))
    assert sizes == [10, 10, 3, 16, 7]
    count_letters = {"collate_fn": lambda texts: torch.tensor([len(text) for text in texts])}
    lengths = predict(["a", "bb", "ccc"], lambda _, batch: batch, **count_letters)
    assert lengths.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="micro_batch=0 must be >= 1"):
        predict(torch.arange(3), micro_batch=0)


def test_a_bad_sample_would_shift_the_others() -> None:
    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            if index == 2:
                raise OSError("no such image")
            return super().__getitem__(index)

    data = SkipBad(as_source(Broken(range(6))), lambda _: None)
    with pytest.raises(ValueError, match="sample 2 is bad, so predictions would not line up with the data: no such"):
        predict(data, lambda _, batch: batch)
