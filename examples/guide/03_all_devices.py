"""Step 3: on all devices. Start it with `paceline run`."""

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


train_data, test_data = spirals(1000, seed=1), spirals(500, seed=2)
with pl.Trainer.setup(
    build_model,
    lambda params: torch.optim.AdamW(params, lr=2e-2),
    data=train_data,
    global_batch=64,  # samples per optimizer step, however many workers share them
    micro_batch=8,  # samples per forward and backward: 8 micro-batches to share
) as trainer:

    def log(record):
        if trainer.is_main:
            print(f"step {record.step}: loss {record.loss:.3f}, shares {record.shares}")

    trainer.every(50, log)
    for epoch in trainer.epochs(10):
        for batch in epoch:
            trainer.backward(loss_of(trainer.model, batch))
            trainer.step()
    test_loss = trainer.evaluate(test_data, loss_of)
    if trainer.is_main:
        print(f"test loss {test_loss:.3f}, workers: {trainer.world.size}")

assert test_loss < 0.2
