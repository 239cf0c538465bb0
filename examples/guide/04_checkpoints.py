"""Step 4: checkpoints, resuming, evaluation on the way."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl


def spirals(count, seed):
    """Points on two intertwined spirals, and which of the two."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 2
    radius = torch.rand(count, generator=generator)
    angle = math.pi * (3 * radius + label)
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return points + 0.02 * torch.randn(count, 2, generator=generator), label


def build_model():
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def loss_of(model, batch):
    return F.cross_entropy(model(batch.x), batch.y)


def train(num_epochs):
    """Train up to this epoch, from wherever the run in the folder stands; the test loss after it."""
    with pl.Trainer.setup(
        build_model,
        lambda params: torch.optim.AdamW(params, lr=2e-2),
        data=train_data,
        global_batch=64,
        micro_batch=8,
        checkpoints=pl.Checkpoints("runs/spirals", every_steps=50, keep_last=2, keep_best=("test_loss", 1)),
    ) as trainer:
        if trainer.is_main and trainer.resumed_from:
            print(f"going on from {trainer.resumed_from}")
        for epoch in trainer.epochs(num_epochs):
            for batch in epoch:
                trainer.backward(loss_of(trainer.model, batch))
                trainer.step()
            trainer.save(metrics={"test_loss": trainer.evaluate(test_data, loss_of)})
        test_loss = trainer.evaluate(test_data, loss_of)
        if trainer.is_main:
            print(f"step {trainer.position.step}: test loss {test_loss:.3f}")
    return test_loss


train_data, test_data = spirals(1000, seed=1), spirals(500, seed=2)
first_loss = train(num_epochs=5)
test_loss = train(num_epochs=10)  # as if the script had been stopped and started again
assert test_loss < 0.2
