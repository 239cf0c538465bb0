"""Optimizers that were left to choose are fused, and do what they would have done."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch.nn import functional

import paceline as pl
from paceline.run.step.fused_optimizers import step_sgd

Factory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def trained(optimizer: Any, **settings: Any) -> dict[str, torch.Tensor]:
    data = vectors(40)
    with pl.Trainer.setup(mlp, optimizer, data=data, global_batch=8, **grouped(**settings)) as trainer:
        for epoch in trainer.epochs(3):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        state: dict[str, torch.Tensor] = trainer.model.state_dict()
        return state


def is_fused(optimizer: Any, **settings: Any) -> list[Any]:
    with pl.Trainer.setup(mlp, optimizer, data=vectors(8), global_batch=8, **grouped(**settings)) as trainer:
        return [group["fused"] for group in trainer.optimizer.param_groups]


@pytest.mark.parametrize(
    "factory",
    [
        lambda p, **choice: torch.optim.SGD(p, lr=0.05, **choice),
        lambda p, **choice: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True, **choice),
        lambda p, **choice: torch.optim.Adam(p, lr=0.01, amsgrad=True, **choice),
        lambda p, **choice: torch.optim.AdamW(p, lr=0.01, **choice),
        lambda p, **choice: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:], "lr": 0.1}], lr=0.01, **choice),
    ],
    ids=["SGD", "momentum", "Adam", "AdamW", "groups"],
)
def test_they_do_what_torch_does_with_fused_and_nearly_what_it_does_without(factory: Any) -> None:
    assert set(is_fused(factory)) == {True}
    ours = trained(factory)
    assert digest(ours) == digest(trained(lambda p: factory(p, fused=True)))
    torch.testing.assert_close(ours, trained(factory, fused_optimizers=False), rtol=1e-4, atol=1e-6)


def test_the_setting_leaves_them_as_they_are() -> None:
    assert is_fused(torch.optim.AdamW, fused_optimizers=False) == [None]
    plain = trained(lambda p: torch.optim.AdamW(p, foreach=False))
    assert digest(trained(torch.optim.AdamW, fused_optimizers=False)) == digest(plain)


def test_an_optimizer_that_the_user_built_is_not_changed() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with pl.Trainer.setup(model, optimizer, data=vectors(8), global_batch=8) as trainer:
        assert [group["fused"] for group in trainer.optimizer.param_groups] == [None]


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,), (2, 2))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_momentum_starts_with_a_parameters_first_gradient(dtype: torch.dtype) -> None:
    """PyTorch's fused SGD raises a TypeError here; the plain one is the reference."""
    results = []
    for fused in (True, False):
        own = [torch.nn.Parameter(p.detach().to(dtype)) for p in parameters()]
        optimizer = torch.optim.SGD(own, 0.1, momentum=0.9, fused=fused)
        for number in range(6):
            for index, parameter in enumerate(own):
                parameter.grad = torch.full_like(parameter, number + index) if index or number > 1 else None
            step_sgd(optimizer)
        assert optimizer.param_groups[0]["fused"] is fused
        results.append([parameter.detach() for parameter in own])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def used_before(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class OwnAdamW(torch.optim.AdamW):
    """May do anything in its step."""


@pytest.mark.parametrize(
    ("factory", "before", "reason"),
    [
        (lambda p: torch.optim.AdamW(p, foreach=True), None, "AdamW is not fused: it was made with foreach=True"),
        (lambda p: torch.optim.AdamW(p, fused=False), False, "it was made with fused=False"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), None, "it was made with differentiable=True"),
        (used_before, None, "it was used before"),
        (OwnAdamW, None, "OwnAdamW is not fused: PyTorch has no fused kernel for it"),
    ],
)
def test_others_stay_as_they_are_and_the_log_says_why(
    factory: Factory, before: bool | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        assert is_fused(factory) == [before]
    assert reason in caplog.text


def test_an_optimizer_without_such_a_kernel_trains(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        trained(lambda p: torch.optim.RMSprop(p, lr=0.01))
    assert "the RMSprop is not fused: PyTorch has no fused kernel for it" in caplog.text
