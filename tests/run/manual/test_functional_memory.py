"""Batches of the functional interface that are too large for memory are run in parts, or say why they cannot."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from models import digest, mlp
from step_by_step import X, Y, one_step, prepare
from torch import nn
from torch.nn import functional

import paceline as pl
from paceline.run.manual.halving import parts


class Limited(nn.Module):
    """Pretends that a device has room for so many samples."""

    def __init__(self, model: nn.Module, limit: int) -> None:
        super().__init__()
        self.model = model
        self.limit = limit
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("out of memory")
        return self.model(x)


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_what_does_not_fit_is_run_in_parts(limit: int) -> None:
    model = mlp()
    results = []
    for allowed in (10, limit):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with prepare(Limited(copy.deepcopy(model), allowed), nsamples=10, epochs=2) as state:
                losses = pl.compat.resnetimagenet.train(functional.cross_entropy, state).losses
                results.append((state.models[0].state_dict(), torch.tensor(losses)))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    assert len(told) == 1
    assert "10 samples at once do not fit in the memory of cpu: they are run in parts of" in str(told[0].message)
    assert "nsamples=5" in str(told[0].message)


@pytest.mark.filterwarnings("ignore:.*samples at once do not fit")
def test_an_attempt_that_failed_leaves_nothing_behind() -> None:
    class FailsLate(nn.Module):
        """Runs out of memory in backward, when gradients and buffers of an attempt are there already."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if len(x) > 2:
                x = self.layer.weight.sum() * 0 + x
                self.layer.weight.register_hook(self.fail)
            return self.layer(x)

        def fail(self, gradient: torch.Tensor) -> torch.Tensor:
            if self.must_fail:
                self.must_fail = False
                raise torch.OutOfMemoryError("out of memory")
            return gradient

        must_fail = True

    with prepare(FailsLate(), replicas=1) as state:
        before = copy.deepcopy(state.models[0].layer)
        pl.compat.resnetimagenet.train_step(functional.cross_entropy, state, (X[:4], Y[:4]))
        functional.cross_entropy(before(X[:4]), Y[:4]).backward()
        torch.testing.assert_close(state.models[0].layer.weight.grad, before.weight.grad)
        torch.testing.assert_close(state.models[0].layer.bias.grad, before.bias.grad)
        with pytest.warns(UserWarning, match="buffer 'calls' changes"):
            pl.compat.resnetimagenet.sync_buffer(state)
        assert state.models[0].calls == 2


def test_a_loss_function_that_raises_leaves_nothing_behind() -> None:
    def broken(*_: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    batch = (X[:4], Y[:4])
    with prepare(nn.Sequential(nn.BatchNorm1d(12), mlp()), replicas=1) as state:
        before = digest(state.models[0].state_dict())
        with pytest.raises(ZeroDivisionError):
            pl.compat.resnetimagenet.train_step(broken, state, batch)
        assert digest(state.models[0].state_dict()) == before
        one_step(state, (batch,))
        assert state.models[0][0].num_batches_tracked == 1


def test_a_single_sample_that_does_not_fit_is_an_error() -> None:
    with (
        prepare(Limited(mlp(), 0), replicas=1) as state,
        pytest.warns(UserWarning, match="do not fit"),
        pytest.raises(torch.OutOfMemoryError, match="out of memory") as raised,
    ):
        pl.compat.resnetimagenet.train(functional.cross_entropy, state)
    assert raised.value.__notes__ == ["a single sample does not fit in the memory of cpu"]


@pytest.mark.parametrize(
    ("model", "exact", "text"),
    [
        (
            mlp(),
            True,
            "nsamples=4 samples do not fit in the memory of cpu, .* since exact=True .*: choose nsamples <= 2",
        ),
        (
            nn.Sequential(nn.BatchNorm1d(12), mlp()),
            False,
            "the BatchNorm layer 'model.0' would normalise the parts",
        ),
    ],
)
def test_parts_are_refused_where_they_would_change_the_result(model: nn.Module, exact: bool, text: str) -> None:
    with prepare(Limited(model, 3), exact=exact) as state, pytest.raises(torch.OutOfMemoryError, match=text):
        pl.compat.resnetimagenet.train(functional.cross_entropy, state)


def test_batch_norm_in_evaluation_mode_may_be_run_in_parts() -> None:
    model = nn.Sequential(nn.BatchNorm1d(12), mlp()).eval()
    with prepare(Limited(model, 3), train_mode=False) as state, pytest.warns(UserWarning, match="do not fit"):
        pl.compat.resnetimagenet.train(functional.cross_entropy, state)


def test_a_batch_is_cut_wherever_it_has_a_row_per_sample() -> None:
    batch = {"x": torch.arange(5), "names": ["a", "b", "c", "d", "e"], "scale": torch.tensor(2.0), "pair": (Y[:5], 3)}
    first, second, third = parts(batch, 5, 2)
    assert [count for _, count in (first, second, third)] == [2, 2, 1]
    assert second[0]["x"].tolist() == [2, 3]
    assert second[0]["names"] == ["c", "d"]
    assert second[0]["scale"] == 2.0
    assert third[0]["pair"][0].tolist() == Y[4:5].tolist()
    assert third[0]["pair"][1] == 3


@dataclass
class Batch:
    x: torch.Tensor
    names: list[str]


def test_a_data_class_is_cut_too() -> None:
    _, second = parts(Batch(torch.arange(3), ["a", "b", "c"]), 3, 2)
    assert (second[0].x.tolist(), second[0].names, second[1]) == ([2], ["c"], 1)


def test_a_last_batch_of_one_sample_is_explained_where_batch_norm_cannot_take_it() -> None:
    with prepare(nn.Sequential(nn.BatchNorm1d(12), mlp()), data=(X[:9], Y[:9])) as state:
        with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
            pl.compat.resnetimagenet.train(functional.cross_entropy, state)
        assert "choose another nsamples than 4" in raised.value.__notes__[0]


def test_a_pair_is_not_cut_although_it_is_as_long_as_the_batch() -> None:
    first, second = parts(({"x": X[:2]}, {"y": Y[:2]}), 2, 1)
    for (inputs, targets), row in ((first[0], 0), (second[0], 1)):
        assert inputs["x"].tolist() == X[row : row + 1].tolist()
        assert targets["y"].tolist() == Y[row : row + 1].tolist()
