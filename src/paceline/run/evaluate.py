"""Evaluation: every sample once, over all workers, and the same number however many there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.core.seeding import Purpose, derive_seed, seed_device
from paceline.data.sharded import ShardedFeed
from paceline.data.sources import Source
from paceline.plan.steps import Steps
from paceline.run.loop import plan_step

Scalars = Mapping[str, Any]


@torch.no_grad()
def evaluate(
    model: Any,
    source: Source,
    eval_fn: Callable[[Any, Any], Any],
    communicator: Communicator,
    *,
    micro_batch: int,
    seed: int,
    weight_fn: Callable[[Any], int] | None,
) -> float | dict[str, float]:
    """The mean of `eval_fn(model, batch)` over all samples, weighted like training.

    eval_fn returns a mean over its micro-batch: one number, or a dict of them. The model is in evaluation mode
    meanwhile. Each micro-batch's result has a slot of its own, so the mean is added up in one order everywhere.
    """
    world = communicator.world
    steps = Steps(len(source), micro_batch, micro_batch)
    feed = ShardedFeed(source, steps, world.device, seed=seed, shuffle=False, weight_fn=weight_fn)
    mine = plan_step(steps.num_steps, (1.0,) * world.size)[world.rank]
    names: list[str] | None = None
    rows: list[torch.Tensor] = []
    weights: list[int] = []
    with _evaluation_mode(model):
        for number in mine:
            batch, weight = feed.micro_batch(0, number, 0)
            seed_device(world.device, derive_seed(seed, Purpose.EVALUATION, number))
            result = eval_fn(model, batch)
            scalars: Scalars = result if isinstance(result, Mapping) else {"": result}
            names = names or list(scalars)
            values = [torch.as_tensor(scalars[name], dtype=torch.float64, device=world.device) for name in names]
            # Without weight a mean may be 0/0, and counts for nothing.
            rows.append(torch.stack(values) if weight else torch.zeros(len(values)).to(values[0]))
            weights.append(weight)
    names = _agree_on_names(names, communicator)
    table = torch.zeros(steps.num_steps, len(names) + 1, dtype=torch.float64, device=world.device)
    if rows:
        table[mine.start : mine.stop, :-1] = torch.stack(rows)
        table[mine.start : mine.stop, -1] = torch.tensor(weights, dtype=torch.float64)
    communicator.all_reduce(table).wait()
    on_host = table.cpu()
    results, weight_column = on_host[:, :-1], on_host[:, -1:]
    means = ((results * weight_column).sum(0) / weight_column.sum()).tolist()
    return means[0] if names == [""] else dict(zip(names, means, strict=True))


def _agree_on_names(names: list[str] | None, communicator: Communicator) -> list[str]:
    """A worker without a micro-batch has not seen what eval_fn returns: rank 0, which always has one, tells."""
    if communicator.world.size == 1:
        assert names is not None
        return names
    device = communicator.world.device
    text = "\n".join(names or []).encode()
    size = torch.tensor([len(text)], device=device)
    communicator.broadcast(size, 0).wait()
    content = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if communicator.world.is_main:
        content.copy_(torch.tensor(list(text), dtype=torch.uint8))
    communicator.broadcast(content, 0).wait()
    return bytes(content.tolist()).decode().split("\n")


class _evaluation_mode:
    """Evaluation mode, and back to what each module was in."""

    def __init__(self, model: Any) -> None:
        self._modules = list(model.modules()) if isinstance(model, nn.Module) else []

    def __enter__(self) -> None:
        self._was_training = [module.training for module in self._modules]
        for module in self._modules:
            module.training = False

    def __exit__(self, *_: object) -> None:
        for module, was_training in zip(self._modules, self._was_training, strict=True):
            module.training = was_training
