"""What the functional interface refuses, by name, and what it leaves behind then: nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import mlp
from step_by_step import Stream, X, Y, prepare, sgd
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"replicas": 0}, ValueError, "devices is empty: name at least one, or pass None for all of this machine"),
        ({"nsamples": 0}, ValueError, "nsamples=0 must be >= 1"),
        ({"nsamples": None}, ValueError, "nsamples is missing: give the number of samples per device and step"),
        ({"epochs": 0}, ValueError, "epochs=0 must be >= 1"),
        ({"cycle": 0}, ValueError, "cycle=0 must be >= 1"),
        ({"epochs": 3, "cycle": 9}, ValueError, "epochs=3 and cycle=9 both limit the run"),
        ({"buffersize": 2}, ValueError, "buffersize=2 would be ignored, since tensors and arrays are in memory"),
        ({"data": Stream(), "buffersize": 2}, ValueError, "buffersize=2 would be ignored, since a stream"),
        ({"data": []}, ValueError, "data is empty: give at least one sample"),
        ({"optimizer": lambda _: "adam"}, TypeError, "optimizer made a str: pass a function from parameters"),
        ({"optimizer": sgd([torch.zeros(1)])}, TypeError, "optimizer is a SGD, but every replica needs its own"),
        ({"model": nn.ReLU()}, ValueError, "the model has no parameter that requires a gradient"),
        ({"data": pl.PerWorker([[X]]), "nsamples": None}, ValueError, "PerWorker has 1 iterables for 2 devices"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        prepare(**settings)


def test_one_device_is_no_list_of_devices() -> None:
    with pytest.raises(TypeError, match=r"devices='cpu' is one device: give a list, such as \['cpu'\]"):
        pl.compat.resnetimagenet.prepare_training(mlp, (X, Y), "cpu", sgd, 4)


def test_a_stream_without_samples_is_an_error_and_no_endless_loop() -> None:
    class Nothing(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with (
        prepare(data=Nothing(), readers=0, cycle=3) as state,
        pytest.raises(ValueError, match="epoch 0 of the data has no sample"),
    ):
        pl.compat.resnetimagenet.train(functional.cross_entropy, state)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"validate_every": 2}, "validate_every=2 would be ignored: give the data as validation="),
        ({"validate_every": 0, "validation": (X, Y)}, "validate_every=0 must be >= 1"),
        ({"verbose": -1}, "verbose=-1 must be >= 0"),
        ({"topk": (0,), "validation": (X, Y)}, r"topk=\(0,\) must be >= 1"),
        ({"topk": 5, "validation": (X, Y)}, "topk=5 must be a list of numbers"),
    ],
)
def test_bad_settings_of_train_are_named(settings: dict[str, Any], text: str) -> None:
    with prepare() as state, pytest.raises(ValueError, match=text):
        pl.compat.resnetimagenet.train(functional.cross_entropy, state, **settings)


@pytest.mark.parametrize(
    ("loss_fn", "error", "text"),
    [
        (lambda out, y: functional.cross_entropy(out, y, reduction="none"), ValueError, r"the loss has shape \(4,\)"),
        (lambda *_: 1.0, TypeError, "the loss is a float: it must be a tensor with one number"),
        (lambda *_: torch.zeros(()), ValueError, "the loss has no gradient"),
    ],
)
def test_a_loss_must_be_one_number(loss_fn: Callable[..., Any], error: type[Exception], text: str) -> None:
    with prepare() as state, pytest.raises(error, match=text):
        pl.compat.resnetimagenet.train(loss_fn, state)


def test_a_loss_that_is_not_finite_is_reported() -> None:
    with prepare() as state, pytest.raises(pl.errors.NonFiniteError, match="loss is nan at step 1, micro-batch 0"):
        pl.compat.resnetimagenet.train(lambda output, _: output.mean() * math.nan, state)


def test_a_replica_that_does_not_exist_is_named() -> None:
    with prepare() as state:
        for replica in (2, -1):
            with pytest.raises(ValueError, match=f"replica={replica} must be >= 0 and <= 1"):
                pl.compat.resnetimagenet.train_step(functional.cross_entropy, state, (X[:4], Y[:4]), replica)


def test_a_batch_that_is_no_pair_needs_a_forward_function() -> None:
    with prepare(data=X) as state, pytest.raises(TypeError, match=r"a batch is a Tensor, not a pair .* forward_fn"):
        pl.compat.resnetimagenet.train(functional.cross_entropy, state)


def test_the_order_of_calls_is_checked() -> None:
    batch = (X[:4], Y[:4])
    with prepare() as state:
        with pytest.raises(pl.errors.MisuseError, match="no replica has a gradient to share: call train_step"):
            pl.compat.resnetimagenet.sync_buffer(state)
        with pytest.raises(pl.errors.MisuseError, match="update was called before sync_buffer"):
            pl.compat.resnetimagenet.update(state)
        with pytest.raises(pl.errors.MisuseError, match="no step has been synchronized yet"):
            _ = state.loss
        pl.compat.resnetimagenet.train_step(functional.cross_entropy, state, batch)
        with pytest.raises(pl.errors.MisuseError, match="replica 0 already has a gradient"):
            pl.compat.resnetimagenet.train_step(functional.cross_entropy, state, batch)
        pl.compat.resnetimagenet.sync_buffer(state)
        with pytest.raises(pl.errors.MisuseError, match="the gradients of this step are already synchronized"):
            pl.compat.resnetimagenet.sync_buffer(state)
        with pytest.raises(pl.errors.MisuseError, match="train_step was called between sync_buffer and update"):
            pl.compat.resnetimagenet.train_step(functional.cross_entropy, state, batch, 1)
        for lr in (-1.0, math.nan):
            with pytest.raises(ValueError, match=f"lr={lr}: choose a finite number >= 0"):
                pl.compat.resnetimagenet.update(state, lr=lr)
        pl.compat.resnetimagenet.update(state)
        assert state.step == 1


def test_sparse_gradients_are_refused() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            index = torch.arange(12).unsqueeze(0)
            return x @ functional.embedding(index, self.weight, sparse=True)[0]

    with (
        prepare(Sparse()) as state,
        pytest.raises(pl.errors.GradientError, match="parameter 'weight' of replica 0 has a sparse gradient"),
    ):
        pl.compat.resnetimagenet.train(functional.cross_entropy, state)


def test_processes_must_build_the_same_model(pool: WorkerPool) -> None:
    def different() -> None:
        from paceline.core.world import World

        prepare(nn.Linear(12, 4 + World.from_environment().rank))

    with pytest.raises(WorkersFailed, match="built a model whose parameters or buffers differ from rank 0's"):
        pool.run(different, 2)


def test_closing_twice_gives_the_settings_back() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    state = prepare(exact=True)
    assert torch.are_deterministic_algorithms_enabled()
    state.close()
    state.close()
    assert torch.are_deterministic_algorithms_enabled() == before
