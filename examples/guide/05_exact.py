"""Step 5: weights that do not depend on the devices; precision; torch.compile."""

import hashlib
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


def compiled_model():
    return torch.compile(build_model(), backend="inductor" if torch.cuda.is_available() else "eager")


train_data, test_data = spirals(1000, seed=1), spirals(500, seed=2)
with pl.Trainer.setup(
    compiled_model,
    lambda params: torch.optim.AdamW(params, lr=2e-2),
    data=train_data,
    global_batch=64,
    micro_batch=8,
    exact=True,  # every worker may take any micro-batch, no bit changes
    precision="bf16",  # of what runs under trainer.autocast(); weights stay float32
    max_grad_norm=1.0,
) as trainer:
    for epoch in trainer.epochs(10):
        for batch in epoch:
            with trainer.autocast():
                loss = loss_of(trainer.model, batch)
            trainer.backward(loss)
            trainer.step()
    test_loss = trainer.evaluate(test_data, loss_of)
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in trainer.model.parameters())
    digest = hashlib.sha256(weights).hexdigest()
    if trainer.is_main:
        print(trainer.report())
        print(f"test loss {test_loss:.3f}, weights {digest[:16]}")

assert test_loss < 0.2
