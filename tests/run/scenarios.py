"""Whole runs whose course must not depend on where they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from grouping import grouped
from models import SmallResNet, SmallTransformer, digest, images, mlp, tokens, vectors
from torch.nn import functional

import paceline as pl

EPOCHS = 2


@dataclass(frozen=True)
class Scenario:
    """A model with its data and loss."""

    build: Callable[[], torch.nn.Module]
    data: Any
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    scheduler: Callable[[Any], Any] | None = None
    max_grad_norm: float | None = None
    num_epochs: int = EPOCHS


def _next_token_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def _class_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def _warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))


# Divides by neither the micro-batch (4) nor the global batch (8 x 4): 331 = 10 * 32 + 11 makes eleven steps an epoch,
# the last of three micro-batches, the last of those of three samples.
NUM_SAMPLES = 331

SCENARIOS = {
    "transformer": Scenario(
        SmallTransformer,
        tokens(NUM_SAMPLES),
        _next_token_loss,
        lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1),
        _warm_up,
        max_grad_norm=0.5,
    ),
    "resnet": Scenario(
        SmallResNet,
        images(NUM_SAMPLES),
        _class_loss,
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    ),
    "mlp": Scenario(mlp, vectors(NUM_SAMPLES), _class_loss, lambda params: torch.optim.Adam(params, lr=3e-3)),
}


@dataclass(frozen=True)
class Outcome:
    digest: str
    losses: list[float]
    parameters: dict[str, torch.Tensor]
    num_steps: int


def train(name: str, shares: Any = "measured", device: str | None = None, **settings: Any) -> Outcome:
    """Run a scenario in the world this process is in."""
    scenario = SCENARIOS[name]
    settings = {"exact": True, "global_batch": 32, "micro_batch": 4, **settings}
    with pl.Trainer.setup(
        scenario.build,
        scenario.optimizer,
        data=scenario.data,
        scheduler=scenario.scheduler,
        max_grad_norm=scenario.max_grad_norm,
        device=device,
        seed=7,
        **grouped(shares=shares, **settings),
    ) as trainer:
        losses: list[float] = []
        trainer.every(1, lambda record: losses.append(record.loss))
        for epoch in trainer.epochs(scenario.num_epochs):
            for batch in epoch:
                with trainer.autocast():
                    loss = scenario.loss(trainer.model, batch)
                trainer.backward(loss)
                trainer.step()
        state = trainer.model.state_dict()
        return Outcome(
            digest(state, trainer.optimizer.state_dict(), losses),
            losses,
            {key: value.detach().cpu().clone() for key, value in state.items()},
            trainer.position.step,
        )
