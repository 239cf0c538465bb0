"""Straight to autograd's engine: the same gradients and errors as torch's own way, which anything unusual takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.run.step import backward as subject
from paceline.run.step.backward import SWITCH, Backward

WAYS: list[Callable[[torch.Tensor], None]] = [Backward(), torch.Tensor.backward]


@pytest.fixture
def engine_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    run_engine = subject._run_engine
    assert run_engine is not None

    def counted(*arguments: Any, **settings: Any) -> Any:
        calls.append(arguments)
        return run_engine(*arguments, **settings)

    monkeypatch.setattr(subject, "_run_engine", counted)
    return calls


def model() -> nn.Module:
    torch.manual_seed(3)
    return mlp()


def inputs() -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(8, next(model().parameters()).shape[1])


def plain(module: nn.Module) -> torch.Tensor:
    return module(inputs()).square().mean()


def of_one_row(module: nn.Module) -> torch.Tensor:
    return module(inputs()).square().mean().reshape(1, 1)


def in_half_precision(module: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module(inputs()).square().mean()


def checkpointed(module: nn.Module) -> torch.Tensor:
    return checkpoint(module, inputs(), use_reentrant=False).square().mean()


def with_a_hook_that_changes_it_in_place(module: nn.Module) -> torch.Tensor:
    loss = plain(module)
    loss.register_hook(lambda gradient: gradient.mul_(0.5))
    return loss


@pytest.mark.parametrize(
    "loss_of", [plain, of_one_row, in_half_precision, checkpointed, with_a_hook_that_changes_it_in_place]
)
def test_the_gradients_are_those_of_torch(
    loss_of: Callable[[nn.Module], torch.Tensor], engine_calls: list[Any]
) -> None:
    gradients = []
    for way in WAYS:
        module = model()
        for _ in range(2):  # they add up
            way(loss_of(module))
        gradients.append([parameter.grad for parameter in module.parameters()])
    assert len(engine_calls) == 2
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))


class Subclass(torch.Tensor):
    pass


def test_a_subclass_goes_torchs_own_way(engine_calls: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.ones(3, requires_grad=True)
    backward = Backward()
    with caplog.at_level(logging.INFO, "paceline"):
        for _ in range(2):
            backward((2 * weight).sum().as_subclass(Subclass))
    assert torch.equal(weight.grad, torch.full((3,), 4.0))
    assert not engine_calls
    assert [record.getMessage() for record in caplog.records] == [
        "backward is called as torch calls it, not straight: the loss is a Subclass"
    ]


@pytest.mark.parametrize("by_switch", [True, False], ids=["switched off", "another torch"])
def test_every_loss_may_go_torchs_own_way(
    by_switch: bool, engine_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_switch:
        monkeypatch.setenv(SWITCH, "0")
    else:
        monkeypatch.setattr(subject, "_run_engine", None)
    weight = torch.ones(3, requires_grad=True)
    Backward()((2 * weight).sum())
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    assert not engine_calls


def used_twice() -> torch.Tensor:
    loss = torch.ones(3, requires_grad=True).square().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    "make_loss",
    [lambda: torch.tensor(1.0), lambda: torch.ones((), dtype=torch.complex64, requires_grad=True) * 2, used_twice],
    ids=["of no parameter", "complex", "used twice"],
)
def test_what_cannot_be_is_torchs_error(make_loss: Callable[[], torch.Tensor]) -> None:
    errors = []
    for way in WAYS:
        with pytest.raises(RuntimeError) as raised:
            way(make_loss())
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
