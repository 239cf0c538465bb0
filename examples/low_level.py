"""The parts under `dp_train`, used by hand: two workers share every batch 3:1.

Shows one step from the inside, layer by layer:
- plan: which samples make a micro-batch (`EpochOrder`, `Steps`), and who takes which (`shares`, `ranges`);
- comm: how workers reach each other (`connect`);
- sync: the exchange that gives all of them the mean gradient of the whole batch (`MeanGradients`).
The result is checked against one model that plain PyTorch trains on whole batches.

    python examples/low_level.py
"""

from __future__ import annotations

import sys
from contextlib import closing

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.comm import connect
from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.core.world import World
from paceline.plan.epoch import EpochOrder, Steps
from paceline.plan.shares import ranges, shares
from paceline.sync.buffers import Buffers
from paceline.sync.gradients.exchange import MeanGradients

NUM_EPOCHS, LEARNING_RATE, SEED = 10, 0.1, 0
SPEEDS = (3.0, 1.0)  # as if the first worker were three times as fast as the second
# 75 samples: four steps of 16 in four micro-batches, and a last one of 11 in three, the last of those with 3 samples.
STEPS = Steps(num_samples=75, global_batch=16, micro_batch=4)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(STEPS.num_samples, 6, generator=generator)
    return x, torch.tanh(x[:, :1]) - 0.5 * x[:, 1:2]


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def train_replica(model: nn.Module, communicator: Communicator, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """One worker's run; the others do the same at the same time. Returns the loss of every step."""
    rank, device = communicator.world.rank, communicator.world.device
    model, x, y = model.to(device), x.to(device), y.to(device)
    for parameter in model.parameters():
        communicator.broadcast(parameter.detach(), source=0).wait()  # all start with rank 0's weights
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    exchange = MeanGradients(
        dict(model.named_parameters()),
        communicator,
        Buffers(model, communicator),
        max_micro_batches=STEPS.max_micro_batches,
    )
    losses = []
    for epoch in range(NUM_EPOCHS):
        order = EpochOrder(STEPS.num_samples, seed=SEED, epoch=epoch)
        for first in range(0, STEPS.num_micro_batches, STEPS.max_micro_batches):
            num_micro_batches = min(STEPS.max_micro_batches, STEPS.num_micro_batches - first)
            plan = ranges(shares(num_micro_batches, SPEEDS))  # a pure function: no message is needed to agree on it
            exchange.begin_step(plan)
            for number in plan[rank]:
                positions = STEPS.sample_range(first + number)
                rows = torch.from_numpy(order.indices(positions.start, positions.stop)).to(device)
                # The weight is what the loss is a mean over: a short micro-batch counts less.
                exchange.begin_micro_batch(number, weight=len(rows), is_last=number == plan[rank][-1])
                loss = F.mse_loss(model(x[rows]), y[rows])
                loss.backward()
                exchange.end_micro_batch(loss.detach())
            # Here the workers exchange. Afterwards every parameter's .grad is the mean over the whole batch.
            exchange.send()
            numbers = exchange.finish()
            optimizer.step()
            exchange.complete()
            losses.append(numbers.loss)
    exchange.close()
    return losses


def train_whole_batches(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """The same run in plain PyTorch: one model, whole batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for epoch in range(NUM_EPOCHS):
        order = EpochOrder(STEPS.num_samples, seed=SEED, epoch=epoch).indices(0, STEPS.num_samples)
        for rows in torch.from_numpy(order).split(STEPS.global_batch):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def worker() -> tuple[dict[str, torch.Tensor], list[float], bool]:
    """Runs on every worker: the trained weights, the losses, and whether all workers have the same."""
    with closing(connect(World.from_environment(), timeout_s=60.0)) as communicator:
        model = make_model(seed=communicator.world.rank)
        losses = train_replica(model, communicator, *make_data())
        weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        results = gather(str([tensor.tolist() for tensor in weights.values()] + losses), communicator)
    return weights, losses, len(set(results)) == 1


def main() -> int:
    weights, losses, are_equal = pl.launch(worker, len(SPEEDS))
    alone = make_model(seed=0)
    expected_losses = train_whole_batches(alone, *make_data())

    off = max((weights[name] - tensor).abs().max().item() for name, tensor in alone.state_dict().items())
    loss_off = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    print(f"shares of a full step on {len(SPEEDS)} workers: {shares(STEPS.max_micro_batches, SPEEDS)} micro-batches")
    first, last = (sum(part) / len(part) for part in (losses[: STEPS.num_steps], losses[-STEPS.num_steps :]))
    print(f"mean loss of the first epoch {first:.4f}, of the last {last:.4f}; replicas equal to the bit: {are_equal}")
    print(f"off one model on whole batches: weights {off:.1e}, losses {loss_off:.1e}")
    return 0 if are_equal and off < 1e-5 and loss_off < 1e-5 and last < 0.2 * first else 1


if __name__ == "__main__":
    sys.exit(main())
