"""The README's loop: the same code for one device or many.

Run alone it uses one device; `paceline run` starts it on all of them, and the loss printed at the end stays the same.

    python examples/first_steps.py
    paceline run examples/first_steps.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl


def main() -> int:
    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    y = x.sum(dim=1, keepdim=True)

    trainer = pl.Trainer.setup(
        lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)),
        lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=(x, y),
        global_batch=64,
        micro_batch=8,
    )
    losses: list[float] = []
    trainer.every(1, lambda record: losses.append(record.loss))  # on every worker, also one without a share of a step
    for epoch in trainer.epochs(3):
        for batch in epoch:
            loss = F.mse_loss(trainer.model(batch.x), batch.y)
            trainer.backward(loss)
            trainer.step()  # completes the optimizer step when this was its last micro-batch
    last_loss = trainer.evaluate((x, y), lambda model, batch: F.mse_loss(model(batch.x), batch.y))
    trainer.close()

    if trainer.is_main:
        print(f"loss of the first step {losses[0]:.3f}, over all samples after 3 epochs {last_loss:.3f}")
    return 0 if last_loss < 0.1 * losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
