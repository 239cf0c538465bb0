"""Gradients changed between backward and step: refused everywhere, since there they are one micro-batch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest
from torch import nn
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.sync.gradients.watch import NUM_WHOLE_CHECKS

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))

Change = Callable[[nn.Module], object]


def scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def replace(model: nn.Module) -> None:
    model[2].bias.grad = model[2].bias.grad * 0.5


CHANGES: dict[str, Change] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "scaling": scale,
    "one element": lambda model: model[0].weight.grad[0, 0].zero_(),
    "another tensor": replace,
    "zero_grad in place": lambda model: model.zero_grad(set_to_none=False),
}
BACKWARD: dict[str, Callable[[pl.Trainer, torch.Tensor], None]] = {
    "trainer.backward": lambda trainer, loss: trainer.backward(loss),
    "loss.backward": lambda _, loss: loss.backward(),
}


def train(
    backward: str,
    after_backward: Change = lambda _: None,
    before_backward: Change = lambda _: None,
    **settings: Any,
) -> str:
    settings = {"data": X, "global_batch": 12, "micro_batch": 2, "shuffle": False, **settings}
    with pl.Trainer.setup(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),
        lambda p: torch.optim.SGD(p, 0.1),
        **grouped(**settings),
    ) as trainer:
        for epoch in trainer.epochs(2):
            for batch in epoch:
                loss = trainer.model(batch).square().mean()
                before_backward(trainer.model)
                BACKWARD[backward](trainer, loss)
                after_backward(trainer.model)
                trainer.step()
        return digest(trainer.model.state_dict())


MESSAGE = (
    r"the gradient of '\d\.\w+' was changed between backward\(\) and step\(\).*max_grad_norm=.*trainer\.on_gradients"
)


@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("name", CHANGES)
def test_it_is_refused_with_the_remedy(name: str, backward: str) -> None:
    for settings in ({}, {"exact": True}, {"global_batch": 2}):
        with pytest.raises(pl.errors.MisuseError, match=MESSAGE):
            train(backward, CHANGES[name], **settings)


@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("exact", [False, True])
def test_on_every_number_of_workers(size: int, exact: bool, backward: str, pool: WorkerPool) -> None:
    with pytest.raises(WorkersFailed, match=MESSAGE):
        pool.run(partial(train, backward, CHANGES["clip_grad_norm_"], exact=exact), size)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("exact", [False, True])
def test_zero_grad_before_backward_is_harmless(set_to_none: bool, exact: bool, pool: WorkerPool) -> None:
    """Left over from a plain loop: gradients of earlier micro-batches of the step are safe."""

    def with_zero_grad(**settings: Any) -> str:
        return train(
            "trainer.backward", before_backward=lambda m: m.zero_grad(set_to_none=set_to_none), exact=exact, **settings
        )

    assert with_zero_grad() == train("trainer.backward", exact=exact)
    outcomes = pool.run(partial(with_zero_grad, shares="equal"), 2)
    assert outcomes == pool.run(partial(train, "trainer.backward", exact=exact, shares="equal"), 2)


@pytest.mark.parametrize("backward", BACKWARD)
def test_gradients_that_are_gone_are_missed(backward: str) -> None:
    for settings in ({}, {"exact": True}, {"global_batch": 2}):
        with pytest.raises(pl.errors.MisuseError, match=r"do not call zero_grad\(\)|this micro-batch has no gradient"):
            train(backward, lambda model: model.zero_grad(), **settings)


def test_a_change_between_two_backward_calls_is_found() -> None:
    with pl.Trainer.setup(nn.Linear(6, 1), lambda p: torch.optim.SGD(p, 0.1), data=X, global_batch=12) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(trainer.model(batch).square().mean())
                trainer.model.weight.grad.mul_(2)
                with pytest.raises(pl.errors.MisuseError, match="the gradient of 'weight' was changed"):
                    trainer.backward(trainer.model(batch).mean())
                return


def test_mixed_calls_of_backward_are_refused() -> None:
    def both(trainer: pl.Trainer, loss: torch.Tensor) -> None:
        trainer.backward(loss * 0.5)

    BACKWARD["both"] = both
    try:
        with pytest.raises(pl.errors.MisuseError, match=r"call trainer\.backward for every loss"):
            train("both", lambda model: model(X).mean().backward())
    finally:
        del BACKWARD["both"]


def test_hooks_on_gradients_still_change_them() -> None:
    """Inside backward they are part of it; `on_gradients` sees the mean."""

    def hooked(micro_batch: int) -> str:
        model = nn.Linear(6, 1)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        model.weight.register_hook(lambda gradient: gradient * 0.5)
        with pl.Trainer.setup(
            model, lambda p: torch.optim.SGD(p, 0.1), data=X, global_batch=12, micro_batch=micro_batch, exact=True
        ) as trainer:
            trainer.on_gradients(lambda parameters: parameters["bias"].grad.zero_())
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    trainer.backward(trainer.model(batch).square().mean())
                    trainer.step()
            return f"{trainer.model.weight.sum().item():.4f} {trainer.model.bias.item():.4f}"

    assert hooked(2) == hooked(12)


@pytest.mark.parametrize(("name", "found_within"), [("scaling", 1), ("one element", 4)])
def test_a_tiny_model_is_watched_by_turns_after_its_first_micro_batches(name: str, found_within: int) -> None:
    """All gradients at first, then one of four in each micro-batch: a change of all is found at once."""
    begin = NUM_WHOLE_CHECKS + 3
    seen: list[int] = []

    def change(model: nn.Module) -> None:
        seen.append(len(seen))
        if len(seen) > begin:
            CHANGES[name](model)

    with pytest.raises(pl.errors.MisuseError, match=MESSAGE):
        train("trainer.backward", change, data=X.repeat(8, 1), global_batch=2)
    assert begin < len(seen) <= begin + found_within
