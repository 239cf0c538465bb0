"""Row D5: n replicas give the gradient, the weights and the optimizer state of one model on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from image_models import convolution, linear, pooling
from models import SmallResNet, digest
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(12, 3, 8, 8, generator=GENERATOR)
LABELS = torch.randint(0, 5, (12,), generator=GENERATOR)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 5))


MODELS = {f.__name__: f for f in (linear, convolution, pooling, normalised, SmallResNet)}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def one_step(name: str, training: bool, exact: bool) -> dict[str, Any]:
    """One step over all twelve images in micro-batches of 3: the mean gradient, then weights and optimizer state."""
    gradients: dict[str, torch.Tensor] = {}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = adam(parameters)
        names = dict(trainer_model[0].named_parameters())
        made.register_step_pre_hook(
            lambda *_: gradients.update({k: p.grad.detach().clone() for k, p in names.items()}) or None
        )
        return made

    trainer_model: list[nn.Module] = []

    def build() -> nn.Module:
        trainer_model.append(MODELS[name]().train(training))
        return trainer_model[0]

    with pl.Trainer.setup(
        build,
        optimizer,
        data=(IMAGES, LABELS),
        global_batch=12,
        micro_batch=3,
        shuffle=False,
        exact=exact,
        optimization=pl.Optimization(train_mode=training),
    ) as trainer:
        initial = copy.deepcopy(trainer.model.state_dict())
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        state = copy.deepcopy(trainer.model.state_dict())
        return {"initial": initial, "gradients": gradients, "state": state, "optimizer": trainer.optimizer.state_dict()}


def by_hand(initial: dict[str, torch.Tensor], build: Callable[[], nn.Module], training: bool) -> dict[str, Any]:
    """Plain PyTorch from the same weights: the whole batch, or, as BatchNorm in training needs, its parts in turn."""
    model = build().train(training)
    model.load_state_dict(initial)
    optimizer = adam(model.parameters())
    parts = [slice(i, i + 3) for i in range(0, 12, 3)] if training else [slice(0, 12)]
    for part in parts:
        (functional.cross_entropy(model(IMAGES[part]), LABELS[part]) / len(parts)).backward()
    gradients = {k: p.grad.clone() for k, p in model.named_parameters()}
    optimizer.step()
    return {"gradients": gradients, "state": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize(
    ("name", "training"), [*((name, False) for name in MODELS), ("normalised", True), ("SmallResNet", True)]
)
def test_replicas_equal_one_model(name: str, training: bool, pool: WorkerPool) -> None:
    for exact in (False, True):
        outcomes = [one_step(name, training, exact), *pool.run(one_step, 2, name, training, exact)]
        outcomes += pool.run(one_step, 3, name, training, exact)
        expected = by_hand(outcomes[0]["initial"], MODELS[name], training)
        for outcome in outcomes:
            for key, gradient in expected["gradients"].items():
                torch.testing.assert_close(outcome["gradients"][key], gradient, rtol=1e-4, atol=1e-6)
            for key, value in expected["state"].items():
                torch.testing.assert_close(outcome["state"][key], value, rtol=1e-4, atol=1e-4)
            for index, state in expected["optimizer"]["state"].items():
                for key, value in state.items():
                    actual = outcome["optimizer"]["state"][index][key]
                    torch.testing.assert_close(actual, value, rtol=1e-4, atol=1e-6)
        everything = {digest(o["gradients"], o["state"], o["optimizer"]) for o in outcomes}
        if exact:
            assert len(everything) == 1
        assert digest(outcomes[1]["state"]) == digest(outcomes[2]["state"])  # replicas of one world, also plainly
