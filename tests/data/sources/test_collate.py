"""The weight of a micro-batch that a function of the user's made: the rows that arrive, whatever was asked for."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grouping import grouped
from models import digest, vectors
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, IterableDataset, default_collate
from worker_pool import WorkerPool

import paceline as pl
from paceline.data.sources.collate import Pair, count_rows

X, Y = vectors(40)
SAMPLES = list(zip(X, Y.tolist(), strict=True))
NUM_STEPS = 5  # of 8 samples each
Two = namedtuple("Two", "x y")


def kept(sample: tuple[torch.Tensor, int]) -> bool:
    return float(sample[0][0]) > -0.3


def without_some(samples: list[Any]) -> Any:
    """What many write: leave out what is not good; None where nothing is left."""
    good = [sample for sample in samples if kept(sample)]
    return Pair(*default_collate(good)) if good else None


def twice(samples: list[Any]) -> Any:
    return Pair(*default_collate([*samples, samples[0]]))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(SAMPLES)


def build() -> nn.Module:
    return nn.Linear(12, 4)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def plain_pytorch(collate: Any, micro_batch: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Each step as one batch of all rows that the collate function gives for its micro-batches."""
    with pl.Trainer.setup(build, lambda p: torch.optim.SGD(p, lr=0.5), data=X, global_batch=8) as trainer:
        model = trainer.model
    weights = []
    for start in range(0, len(SAMPLES), 8):
        parts = [collate(SAMPLES[i : i + micro_batch]) for i in range(start, start + 8, micro_batch)]
        parts = [part for part in parts if part is not None]
        x, y = torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts])
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
        weights.append(len(x))
    return {k: v.detach().clone() for k, v in model.state_dict().items()}, weights


def run(data: Any, **settings: Any) -> tuple[dict[str, torch.Tensor], list[float], float]:
    weights: list[float] = []
    settings = {"global_batch": 8, "micro_batch": 2, "shuffle": False, **settings}
    with pl.Trainer.setup(build, lambda p: torch.optim.SGD(p, lr=0.5), data=data, **grouped(**settings)) as trainer:
        trainer.every(1, lambda record: weights.append(record.weight))
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(loss_of(trainer.model, batch))
                trainer.step()
        collate = settings.get("collate_fn") or without_some
        evaluated = trainer.evaluate(SAMPLES, loss_of, micro_batch=3, collate_fn=collate)
        return {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}, weights, evaluated


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a list": (SAMPLES, {"collate_fn": without_some}),
    "exact": (SAMPLES, {"collate_fn": without_some, "exact": True}),
    "twice": (SAMPLES, {"collate_fn": twice}),
    "a DataLoader": (DataLoader(SAMPLES, batch_size=2, collate_fn=without_some), {"micro_batch": None}),
    "a batch sampler": (
        DataLoader(SAMPLES, batch_sampler=[[i, i + 1] for i in range(0, 40, 2)], collate_fn=without_some),
        {"micro_batch": None, "global_batch": None, "batches_per_step": 4, "shuffle": None},
    ),
    "dispatched": (SAMPLES, {"collate_fn": without_some, "feed": "dispatched"}),
    "readers": (SAMPLES, {"collate_fn": without_some, "readers": 1}),
    "a stream": (Stream(), {"collate_fn": without_some}),
    "a stream, dispatched": (Stream(), {"collate_fn": without_some, "feed": "dispatched"}),
    "bad samples too": (SAMPLES, {"collate_fn": without_some, "skip_bad_samples": True}),
    "physical": (SAMPLES, {"collate_fn": without_some, "physical_batch": 4}),
}


@pytest.mark.filterwarnings("ignore:collate_fn left no sample")
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_the_mean_over_the_rows_that_arrive(way: str, pool: WorkerPool) -> None:
    data, settings = WAYS[way]
    parameters, weights = plain_pytorch(settings.get("collate_fn") or without_some, 2)
    assert len(set(weights)) > 1 or way == "twice"
    outcomes = [run(data, **settings), *pool.run(lambda: run(data, **settings), 3)]
    for actual, actual_weights, _ in outcomes:
        assert actual_weights == weights
        for name, expected in parameters.items():
            torch.testing.assert_close(actual[name], expected, rtol=1e-5, atol=1e-6)
    assert len({evaluated for *_, evaluated in outcomes}) <= (1 if settings.get("exact") else 4)
    if settings.get("exact"):
        assert len({digest(actual) for actual, *_ in outcomes}) == 1


def test_arrow_rows_that_collate_fn_drops(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from paceline.data.sources.arrow import ArrowSource

    table = pa.table({"x": X.tolist(), "y": Y.tolist()})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)

    def collate(rows: list[Any]) -> Any:
        return without_some([(row["x"].float(), int(row["y"])) for row in rows])

    with pytest.warns(UserWarning, match="collate_fn left no sample of a micro-batch"):
        assert run(ArrowSource(tmp_path, collate_fn=collate))[1] == plain_pytorch(without_some, 2)[1]


def test_an_evaluation_weighs_rows_and_leaves_out_empty_micro_batches(pool: WorkerPool) -> None:
    def evaluated() -> float:
        with pl.Trainer.setup(build, lambda p: torch.optim.SGD(p, lr=0.5), data=X, global_batch=8) as trainer:
            return trainer.evaluate(SAMPLES, loss_of, micro_batch=2, collate_fn=without_some)

    with pl.Trainer.setup(build, lambda p: torch.optim.SGD(p, lr=0.5), data=X, global_batch=8) as trainer:
        with torch.no_grad():
            expected = loss_of(trainer.model, without_some(SAMPLES)).item()
        assert trainer.evaluate(SAMPLES, loss_of, micro_batch=2, collate_fn=without_some) == pytest.approx(expected)
        with pytest.raises(ValueError, match="collate_fn left no sample of the data to evaluate"):
            trainer.evaluate(SAMPLES, loss_of, micro_batch=2, collate_fn=lambda _: None)
        with pytest.raises(ValueError, match=r"predictions would not line up|for a micro-batch of 2 samples"):
            trainer.predict(SAMPLES, lambda model, batch: model(batch.x), micro_batch=2, collate_fn=without_some)
    for size in (2, 3):
        assert pool.run(evaluated, size) == pytest.approx([expected] * size)


class Custom:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.name = x, y, "batch"


@dataclass
class Record:
    x: Any
    name: str = "record"


A, B, C = torch.zeros(4, 7), torch.zeros(3, 7), [torch.zeros(n) for n in (5, 2, 9, 4)]
IMAGES = [torch.zeros(3, size, size) for size in (8, 9, 8, 7)]
BOXES = [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (1, 0, 5, 2)]


@pytest.mark.parametrize(
    ("batch", "samples", "count"),
    [
        (A, [*A], 4),
        (B, [*A], 3),
        ((B, torch.zeros(3, 1)), [*A], 3),
        ([torch.zeros(1, 7), torch.zeros(1).long()], [*A[:2]], 1),  # as many fields as samples
        ([torch.zeros(9), torch.zeros(9), torch.zeros(9), torch.zeros(9)], [*A], 4),
        ([[1, 2, 3, 4, 5]] * 4, list("abcd"), 4),
        ((torch.zeros(30, 8), torch.zeros(30, 1)), [*A] * 8, 30),
        ([list(range(100_000))] * 2, [list(range(100_000))] * 2, 2),
        ({"x": A, "in": {"y": torch.zeros(4), "count": torch.tensor(31), "who": None, "step": 3}}, [*A], 4),
        ({"ids": torch.zeros(4, 9), "places": torch.zeros(1, 9), "tokens": torch.zeros(25)}, [*A], 4),
        ((torch.zeros(37), torch.zeros(4), torch.zeros(4)), [*A], 4),  # EmbeddingBag: tokens, labels, offsets
        ({"x": B, "text": ["a", "b", "c"]}, [*A], 3),
        ((pad_sequence(C, batch_first=True), [5, 2, 9, 4]), C, 4),
        (pack_sequence(C, enforce_sorted=False), C, 4),
        (Two(B, B), [*A], 3),
        ((torch.zeros(9, 4), torch.zeros(4)), [*A], 4),  # (time, samples) and targets
        ((torch.zeros(3, 4), torch.zeros(3)), [*A], 3),
        (Custom(B, B), [*A], 3),
        (Record(B), [*A], 3),
        (np.zeros((3, 2)), [*A], 3),
        (list(IMAGES), IMAGES, 4),
        (IMAGES[1:], IMAGES, 3),
        (tuple(zip(*zip(IMAGES, BOXES, strict=True), strict=True)), list(zip(IMAGES, BOXES, strict=True)), 4),
        ({"images": [image + 1 for image in IMAGES], "names": list("abcd")}, IMAGES, 4),
        ({"x": [c + 1 for c in C]}, C, 4),
        (["a", "b"], ["a", "b", "c"], 2),
        (torch.zeros(0, 7), [*A], 0),
    ],
)  # fmt: skip
def test_rows_of_what_collate_functions_return(batch: Any, samples: list[Any], count: int) -> None:
    assert count_rows(batch, samples) == count


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((B, torch.zeros(4)), "(batch[0]: shape (3, 7), batch[1]: shape (4,)): set weight_fn"),
        ({"x": torch.zeros(5), "y": B}, "that collate_fn made of 4 samples differ in their number of rows"),
        (
            torch.zeros(9, 4),
            "are its samples (batch: shape (9, 4)): set weight_fn",
        ),
        (
            (torch.zeros(9, 4, 2), torch.zeros(9, 4)),
            "whether the rows of a batch that collate_fn made of 4 samples are its samples",
        ),
        ({"edges": torch.zeros(2, 9), "y": torch.zeros(4)}, "batch['edges']: shape (2, 9), batch['y']: shape (4,)"),
        ([torch.zeros(1, 7)] * 4, "batch[0]: shape (1, 7), batch[1]: shape (1, 7), "),
        ("text", "cannot count the samples of a batch: it is a str without rows: set weight_fn"),
        (object(), "cannot count the samples of a batch: it is a object without rows"),
        (torch.tensor(3), "cannot count the samples of a batch: it is a Tensor without rows"),
        ((1, 2), "cannot count the samples of a batch: it is a tuple without rows"),
        ({f"part {i}": torch.zeros(2 + i) for i in range(12)}, "and 4 more)"),
    ],
)
def test_where_rows_cannot_be_seen_weight_fn_is_asked_for(batch: Any, text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        count_rows(batch, [*A])
    with (
        pytest.raises(TypeError, match="set weight_fn, which maps a batch to the number that its loss is a mean over"),
        pl.Trainer.setup(
            build,
            lambda p: torch.optim.SGD(p),
            data=[*A],
            global_batch=4,
            loading=pl.Loading(collate_fn=lambda _: batch),
        ) as trainer,
    ):
        next(iter(next(iter(trainer.epochs(1)))))
    with pl.Trainer.setup(
        build,
        lambda p: torch.optim.SGD(p),
        data=[*A],
        global_batch=4,
        loading=pl.Loading(collate_fn=lambda _: batch),
        weight_fn=lambda _: 4,
    ) as trainer:
        assert next(iter(next(iter(trainer.epochs(1))))) is batch


def test_objects_that_hold_each_other_end() -> None:
    one, other = Record(None), Record(None)
    one.x, other.x = [other, torch.zeros(3)], [one, torch.zeros(3)]
    assert count_rows(one) == 3


def test_getitems_must_return_what_was_asked_for() -> None:
    class Short:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return X[index]

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [X[i] for i in indices[1:]]

    with pytest.raises(ValueError, match="__getitems__ of the data set returned 3 samples for 4 indices"):
        run(Short(), global_batch=4, micro_batch=4)
