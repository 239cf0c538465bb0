"""Evaluation: every sample once, the same number on any number of workers, and no trace in the training."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.data.sources.base import Pair, as_source
from paceline.data.sources.skip_bad import SkipBad

TRAIN, TEST = vectors(16), vectors(23, seed=9)


def setup(model: Any = mlp, **settings: Any) -> pl.Trainer:
    settings = {"data": TRAIN, "global_batch": 8, "micro_batch": 4, **settings}
    return pl.Trainer.setup(model, lambda params: torch.optim.Adam(params, lr=0.01), **grouped(**settings))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def loss_and_accuracy(model: nn.Module, batch: Any) -> dict[str, Any]:
    logits = model(batch.x)
    right = (logits.argmax(1) == batch.y).float().mean()
    return {"loss": functional.cross_entropy(logits, batch.y), "accuracy": right.item()}


def evaluate(eval_fn: Callable[[Any, Any], Any] = loss_of, data: Any = TEST, **settings: Any) -> Any:
    """Evaluate an untrained model, in the world this process is in."""
    micro_batch = settings.pop("eval_micro_batch", None)
    with setup(**settings) as trainer:
        return trainer.evaluate(data, eval_fn, micro_batch=micro_batch)


def everywhere(pool: WorkerPool, *args: Any, **settings: Any) -> list[Any]:
    """The result alone, on 2 workers and on 3."""
    results = [evaluate(*args, **settings)]
    for size in (2, 3):
        results += pool.run(lambda: evaluate(*args, **settings), size)
    return results


def test_the_mean_by_hand() -> None:
    with setup() as trainer:
        loss = trainer.evaluate(TEST, loss_of)
        both = trainer.evaluate(TEST, loss_and_accuracy)
        with torch.no_grad():
            micro_batches = [Pair(*parts) for parts in zip(TEST[0].split(4), TEST[1].split(4), strict=True)]
            losses = [loss_of(trainer.model, batch).double() for batch in micro_batches]
            logits = trainer.model(TEST[0])
    # 23 samples in micro-batches of 4: the last has 3, and counts that much less.
    expected = sum(loss * len(batch.y) for loss, batch in zip(losses, micro_batches, strict=True)) / 23
    assert isinstance(loss, float)
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert loss == pytest.approx(functional.cross_entropy(logits, TEST[1]).item(), rel=1e-6)
    assert list(both) == ["loss", "accuracy"]
    assert both["loss"] == loss
    assert both["accuracy"] == pytest.approx((logits.argmax(1) == TEST[1]).double().mean().item(), rel=1e-6)


@pytest.mark.parametrize("eval_fn", [loss_of, loss_and_accuracy])
def test_the_same_bits_on_any_number_of_workers(eval_fn: Callable[..., Any], pool: WorkerPool) -> None:
    results = everywhere(pool, eval_fn)
    assert len(results) == 6
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("num_samples", [1, 4, 5])
def test_fewer_micro_batches_than_workers(num_samples: int, pool: WorkerPool) -> None:
    data = (TEST[0][:num_samples], TEST[1][:num_samples])
    results = everywhere(pool, loss_and_accuracy, data)
    assert all(result == results[0] for result in results)
    assert math.isfinite(results[0]["loss"])


def seen_samples() -> list[int]:
    seen: list[int] = []
    mean = evaluate(lambda _, batch: seen.extend(batch.tolist()) or batch.double().mean(), torch.arange(23))
    assert mean == pytest.approx(11.0, rel=1e-12)
    return seen


@pytest.mark.parametrize("size", [2, 3])
def test_every_sample_once_over_all_workers(size: int, pool: WorkerPool) -> None:
    shards = pool.run(seen_samples, size)
    assert all(shards)
    assert sorted(index for shard in shards for index in shard) == list(range(23))


def test_the_micro_batch_is_that_of_training_unless_given() -> None:
    sizes: list[int] = []

    def record(_: Any, batch: Any) -> float:
        sizes.append(len(batch.x))
        return 0.0

    evaluate(record)
    evaluate(record, eval_micro_batch=10)
    evaluate(record, micro_batch=None)
    assert sizes == [4] * 5 + [3] + [10, 10, 3] + [8, 8, 7]


@pytest.mark.parametrize("value", [2, 2.0, True, np.float32(2), torch.tensor(2), torch.tensor([[2.0]])])
def test_anything_that_is_one_number_is_a_result(value: Any) -> None:
    assert evaluate(lambda *_: value) == float(value)
    assert evaluate(lambda *_: {"a": value, "b": 1}) == {"a": float(value), "b": 1.0}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "eval_fn returned None: it must return one number, the mean over its micro-batch, or a dict of such"),
        (torch.ones(3), "eval_fn returned shape (3,): it must return one number"),
        ({"loss": 1.0, "each": torch.ones(4, 1)}, "eval_fn returned shape (4, 1) as 'each': it must return one number"),
        ({"name": "x"}, "eval_fn returned 'x' as 'name': it must return one number"),
        ((1.0, 2.0), "eval_fn returned (1.0, 2.0): it must return one number"),
        ({}, "eval_fn returned {}: it must return one number"),
    ],
)
def test_anything_else_is_an_error(result: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        evaluate(lambda *_: result)


def test_names_must_be_the_same_everywhere(pool: WorkerPool) -> None:
    def different(_: Any, batch: torch.Tensor) -> dict[str, float]:
        return {"loss": 1.0} if batch[0] < 20 else {"loss": 1.0, "extra": 2.0}

    text = re.escape("eval_fn returned ['loss', 'extra'] for one micro-batch and ['loss'] for another: it must always")
    with pytest.raises(ValueError, match=text):
        evaluate(different, torch.arange(23))
    with pytest.raises(WorkersFailed, match=text):
        pool.run(lambda: evaluate(different, torch.arange(23)), 2)


def test_names_may_come_in_any_order(pool: WorkerPool) -> None:
    def reordered(_: Any, batch: torch.Tensor) -> dict[str, float]:
        named = [("first", 1.0), ("second\nline", 2.0)]
        return dict(named if batch[0] < 8 else reversed(named))

    expected = {"first": 1.0, "second\nline": 2.0}
    assert all(result == expected for result in everywhere(pool, reordered, torch.arange(23)))


class Regularised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_the_model_is_in_evaluation_mode_and_then_back_in_its_own() -> None:
    with setup(Regularised) as trainer:
        model = trainer.model
        model.body[1].eval()  # a layer that the user keeps frozen
        modes = {name: module.training for name, module in model.named_modules()}
        before = digest(model.state_dict())

        def check(model: nn.Module, batch: Any) -> torch.Tensor:
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            return loss_of(model, batch)

        assert trainer.evaluate(TEST, check) == trainer.evaluate(TEST, check)
        assert {name: module.training for name, module in model.named_modules()} == modes

        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            trainer.evaluate(TEST, fail)
        assert {name: module.training for name, module in model.named_modules()} == modes
        assert digest(model.state_dict()) == before
        assert torch.is_grad_enabled()


def test_random_numbers_belong_to_the_micro_batch(pool: WorkerPool) -> None:
    results = everywhere(pool, lambda *_: torch.rand(()))
    assert all(result == results[0] for result in results)
    assert evaluate(lambda *_: torch.rand(()), seed=1) != results[0]


def test_the_random_stream_goes_on_as_if_nothing_was_drawn(pool: WorkerPool) -> None:
    """Else workers with different micro-batches would draw different numbers in the rest of a hook."""

    def draw_after(evaluates: bool) -> list[float]:
        drawn: list[float] = []
        with setup(Regularised) as trainer:

            def hook(_: pl.StepRecord) -> None:
                if evaluates:
                    trainer.evaluate(TEST, lambda *_: torch.rand(()))
                drawn.append(torch.rand(()).item())

            trainer.every(1, hook)
            train(trainer)
        return drawn

    expected = draw_after(False)
    assert len(set(expected)) == 4
    assert draw_after(True) == expected
    assert pool.run(lambda: draw_after(True), 3) == [expected] * 3


def train(trainer: pl.Trainer) -> None:
    for epoch in trainer.epochs(2):
        for batch in epoch:
            trainer.backward(loss_of(trainer.model, batch))
            trainer.step()


def train_and_evaluate(interval: int | None) -> tuple[str, list[float]]:
    """With dropout and BatchNorm, so that evaluation could leave a trace."""
    losses: list[float] = []
    with setup(Regularised, exact=True) as trainer:
        if interval is not None:
            trainer.every(interval, lambda _: losses.append(trainer.evaluate(TEST, loss_of)))
        train(trainer)
        if interval is not None:
            losses.append(trainer.evaluate(TEST, loss_of))
        return digest(trainer.model.state_dict(), trainer.optimizer.state_dict()), losses


def test_evaluation_inside_every_leaves_no_trace_in_the_training(pool: WorkerPool) -> None:
    expected = train_and_evaluate(1)
    assert len(expected[1]) == 5
    assert len(set(expected[1])) == 4, "the weights change in every step, and not after the last"
    assert train_and_evaluate(None)[0] == expected[0]
    for size in (2, 3):
        assert pool.run(train_and_evaluate, size, 1) == [expected] * size


def test_evaluation_inside_the_loop_is_refused() -> None:
    with setup() as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                with pytest.raises(pl.errors.MisuseError) as caught:
                    trainer.evaluate(TEST, loss_of)
                assert str(caught.value) == (
                    "evaluate() was called inside an epoch's loop, which workers leave at different times: call it "
                    "between epochs, or register it with trainer.every(n, lambda record: ...)"
                )
                trainer.backward(loss_of(trainer.model, batch))
                trainer.step()
            assert math.isfinite(trainer.evaluate(TEST, loss_of)), "the epoch is over here"
        assert math.isfinite(trainer.evaluate(TEST, loss_of))


WEIGHTED = torch.tensor([[5, 1], [5, 1], [3, 0], [3, 0], [2, 1], [2, 0]])


def weighted_mean(_: Any, batch: torch.Tensor) -> torch.Tensor:
    """The mean of the values whose mark is set: 0/0 where none is."""
    return (batch[:, 0] * batch[:, 1]).sum() / batch[:, 1].sum()


def test_weights_are_those_of_training(pool: WorkerPool) -> None:
    settings = {"weight_fn": lambda batch: batch[:, 1].sum(), "data": WEIGHTED}
    assert math.isnan(weighted_mean(None, WEIGHTED[2:4]))

    def weighted(data: torch.Tensor) -> float:
        with setup(**{**settings, "global_batch": 2, "micro_batch": 2}) as trainer:
            return trainer.evaluate(data, weighted_mean)

    # Weights 2, 0, 1: the micro-batch in the middle counts for nothing, not even for NaN.
    expected = (2 * 5.0 + 1 * 2.0) / 3
    assert weighted(WEIGHTED) == pytest.approx(expected, rel=1e-12)
    assert math.isnan(weighted(WEIGHTED[2:4])), "nothing had weight"
    for size in (2, 3):
        assert pool.run(lambda: weighted(WEIGHTED), size) == [weighted(WEIGHTED)] * size


def test_bad_micro_batch_and_data_are_named() -> None:
    with pytest.raises(ValueError, match="micro_batch=-1 must be >= 1"):
        evaluate(eval_micro_batch=-1)
    with pytest.raises(ValueError, match="data is empty"):
        evaluate(data=[])
    with pytest.raises(TypeError, match="data is a int"):
        evaluate(data=3)
    text = "every sample is visited once here, by its number, but a {} is a stream, whose samples have none: pass a"
    for data, name in ((Stream(), "Stream"), (DataLoader(Stream(), 2), "Stream"), (pl.Batches([TEST]), "Batches")):
        with pytest.raises(TypeError, match=text.format(name)):
            evaluate(data=data)


class Stream(IterableDataset):
    """Torch's own __getitem__ would raise a NotImplementedError."""

    def __iter__(self) -> Any:
        return iter(TEST[0])

    def __len__(self) -> int:
        return len(TEST[0])


class ReadBy(Dataset):
    """The process that reads each sample."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_reader_processes_read_for_an_evaluation_too() -> None:
    own = os.getpid()

    def num_processes(data: Any, **settings: Any) -> int:
        seen: list[int] = []
        with setup(**settings) as trainer:
            trainer.evaluate(data, lambda _, batch: float(len(seen.extend(batch.tolist()) or [])), micro_batch=1)
        return 0 if own in seen else len(set(seen))

    assert num_processes(ReadBy()) == 0
    assert num_processes(ReadBy(), readers=2) == 2
    assert num_processes(DataLoader(ReadBy(), 2, num_workers=2)) == 2
    assert num_processes(DataLoader(ReadBy(), 2), readers=2) == 0, "the DataLoader says that it has none"


def test_the_result_does_not_depend_on_who_reads() -> None:
    pairs = list(zip(*TEST, strict=True))
    assert evaluate(data=pairs, readers=2) == evaluate(data=pairs)
    with setup(readers=3) as trainer:
        assert torch.equal(trainer.predict(pairs), trainer.predict(TEST))


def test_bad_samples_are_reported() -> None:
    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            if index == 2:
                raise OSError("no such image")
            return super().__getitem__(index)

    skipped: list[int] = []
    data = SkipBad(as_source(Broken(range(6))), lambda bad: skipped.append(bad.index))
    with setup() as trainer:
        assert trainer.evaluate(data, lambda _, batch: batch.double().mean()) == (0 + 1 + 3 + 4 + 5) / 5
    assert skipped == [2]


def test_a_collate_function_for_the_evaluation() -> None:
    with setup() as trainer:
        assert trainer.evaluate(["a", "bb", "ccc"], lambda _, texts: len("".join(texts)) / 3, collate_fn=list) == 2.0
        with pytest.raises(TypeError, match="it is a str without rows: set weight_fn"):
            trainer.evaluate(["a", "bb", "ccc"], lambda _, text: len(text) / 3, collate_fn="".join)
