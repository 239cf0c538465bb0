"""Linear regression with 1, 2 and 4 replicas, checked against plain PyTorch.

Shows what `dp_train` promises, by testing it:
- the loss falls;
- n replicas with one sample each equal one model with batches of n, to rounding, in the loss of every step;
- in exact mode the result is the same, bit for bit, whether one process or two did the work.

    python examples/dp_train_regression.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl

NUM_STEPS, LEARNING_RATE = 300, 5e-2
Sample = tuple[torch.Tensor, torch.Tensor]


def make_data(num_samples: int = 64) -> list[Sample]:
    """y = 2 a - 3 b + 0.5 c + 1, plus a little noise. One sample is a row of inputs and a row with one target."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num_samples, 3, generator=generator)
    y = x @ torch.tensor([[2.0], [-3.0], [0.5]]) + 1.0 + 0.05 * torch.randn(num_samples, 1, generator=generator)
    return list(zip(x, y, strict=True))


def make_model() -> nn.Module:
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def with_paceline(
    data: list[Sample], num_replicas: int, *, exact: bool = False, workers: int = 1
) -> pl.compat.ggmlr.DpResult:
    return pl.dp_train(
        make_model,
        data,
        loss_fn=F.mse_loss,
        forward_fn=lambda model, sample: model(sample[0]),
        target_fn=lambda sample: sample[1],
        n_gpu=num_replicas,
        n_iter=NUM_STEPS,
        lr=LEARNING_RATE,
        verbose=False,
        exact=exact,
        workers=workers,
    )


def with_batches(data: list[Sample], batch_size: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same training in plain PyTorch, on the CPU: one model, batches of `batch_size`. Weights, and every loss."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(NUM_STEPS):
        rows = [data[(step * batch_size + i) % len(data)] for i in range(batch_size)]
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses


def largest_difference(
    result: pl.compat.ggmlr.DpResult, weights: dict[str, torch.Tensor], losses: list[float]
) -> float:
    """Over the final weights and the loss of every step: a fit that has converged no longer shows an early error."""
    in_weights = max((result.params[name].cpu() - weights[name]).abs().max().item() for name in weights)
    in_losses = max(abs(ours - theirs) for ours, theirs in zip(result.loss_history, losses, strict=True))
    return max(in_weights, in_losses)


def main() -> int:
    data = make_data()
    passed = True
    for num_replicas in (1, 2, 4):
        result = with_paceline(data, num_replicas)
        first, last = (sum(part) / len(part) for part in (result.loss_history[:16], result.loss_history[-16:]))
        difference = largest_difference(result, *with_batches(data, num_replicas))
        print(f"{num_replicas} replica(s): loss {first:.3f} -> {last:.4f}, off plain batches by {difference:.1e}")
        passed = passed and last < 0.1 * first and difference < 1e-4

    alone, together = (with_paceline(data, 4, exact=True, workers=workers) for workers in (1, 2))
    same_weights = all(torch.equal(alone.params[name].cpu(), together.params[name].cpu()) for name in alone.params)
    same_losses = alone.loss_history == together.loss_history
    print(f"exact mode, 4 replicas on 1 and on 2 workers: weights equal {same_weights}, losses equal {same_losses}")
    return 0 if passed and same_weights and same_losses else 1


if __name__ == "__main__":
    sys.exit(main())
