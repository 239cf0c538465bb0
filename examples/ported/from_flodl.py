"""The programs of flodl's `Trainer` and `Ddp`: setup, setup_with, setup_head, builder, and replicas of one's own.

python examples/ported/from_flodl.py
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from data import accuracy, make_model, make_points
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.compat import flodl


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def setup() -> nn.Module:
    """Trainer::setup(&model, builder, optimizer), then `for batch in model.epoch(e).activate()`."""
    trainer = pl.Trainer.setup(make_model, adam, data=make_points(), global_batch=32, micro_batch=8)
    with trainer:
        for epoch in trainer.epochs(6):
            for batch in epoch:
                trainer.backward(F.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
    return trainer.model


def setup_with() -> nn.Module:
    """Trainer::setup_with(..., DdpConfig::new().speed_hint(0, 2.3).overhead_target(0.08))."""
    config = flodl.DdpConfig(speed_hint=(0, 2.3), overhead_target=0.08)
    with pl.Trainer.setup_with(config, make_model, adam, data=make_points(), micro_batch=8) as trainer:
        for epoch in trainer.epochs(20):
            for batch in epoch:
                trainer.backward(F.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
    return trainer.model


class Head:
    """A task head, as flodl-hf's: it has its network as an attribute (HasGraph) and computes the loss."""

    def __init__(self) -> None:
        self.model = make_model()

    def compute_loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.model(batch.x), batch.y)


def setup_head() -> nn.Module:
    with pl.Trainer.setup_head(Head, adam, data=make_points(), global_batch=32) as trainer:
        for epoch in trainer.epochs(6):
            for batch in epoch:
                trainer.backward(trainer.loss(batch))
                trainer.step()
    return trainer.unwrapped_model.model


def builder() -> nn.Module:
    """Trainer::builder(...).policy(ApplyPolicy::Cadence).run()?, handle.join()?"""
    handle = (
        pl.Trainer.builder(make_model, adam, lambda model, batch: F.cross_entropy(model(batch.x), batch.y))
        .dataset(make_points())
        .batch_size(32)
        .num_epochs(6)
        .policy("cadence")
        .backend("cpu")
        .run()
    )
    state = handle.join()
    model = make_model()
    model.load_state_dict(state.model)
    return model


def wrap() -> nn.Module:
    """Ddp::wrap(&[&model0, &model1], &devices), and the steps by hand."""
    models = [make_model(), make_model()]
    ddp = pl.Ddp.wrap(models, ["cpu", "cpu"])
    ddp.sync_params()
    optimizers = [adam(model.parameters()) for model in models]
    x, y = make_points()
    for start in range(0, 256, 32):
        for model, part in zip(models, (slice(start, start + 24), slice(start + 24, start + 32)), strict=True):
            F.cross_entropy(model(x[part]), y[part]).backward()
        ddp.weighted_all_reduce_gradients([24, 8])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    return models[0]


def main() -> int:
    reached = {each.__name__: accuracy(each()) for each in (setup, setup_with, setup_head, builder, wrap)}
    print(reached)
    return 0 if all(value > 0.8 for value in reached.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
