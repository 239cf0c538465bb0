"""Evaluation: every sample once, over all workers, and the same number however many there are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.core.seeding import Purpose, derive_seed, seed_device
from paceline.data.device import DeviceCopier
from paceline.data.orders import SeededEpochs
from paceline.data.sharded import checked_weight, read_request
from paceline.data.sources import Source
from paceline.plan.shares import ranges, shares
from paceline.plan.steps import Steps

# What eval_fn's result is called if it is one number.
UNNAMED = ""


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
    meanwhile, and torch's random streams go on afterwards as if nothing had been drawn. Each micro-batch's result has
    a slot of its own, so the mean is added up in one order everywhere.
    """
    if not isinstance(micro_batch, int) or micro_batch < 1:
        raise ValueError(f"micro_batch={micro_batch!r}: choose how many samples eval_fn gets at once, at least 1")
    world = communicator.world
    steps = Steps(len(source), micro_batch, micro_batch)
    epoch = SeededEpochs(steps, len(source), seed=seed, shuffle=False).begin(0)
    to_device = DeviceCopier(world.device)
    mine = ranges(shares(steps.num_micro_batches, (1.0,) * world.size))[world.rank]
    results: list[dict[str, torch.Tensor]] = []
    weights: list[int] = []
    with _evaluation_mode(model), torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        for number in mine:
            batch, num_samples, skipped = read_request(source, epoch.request(number, 1))
            if batch is None:
                raise ValueError(f"all samples of the evaluation's micro-batch {number} are bad: {skipped[0].error}")
            weights.append(num_samples if weight_fn is None else checked_weight(weight_fn(batch)))
            seed_device(world.device, derive_seed(seed, Purpose.EVALUATION, number))
            results.append(_as_scalars(eval_fn(model, to_device(batch)), world.device))
    names = _agree_on_names(results, communicator)
    table = torch.zeros(steps.num_micro_batches, len(names) + 1, dtype=torch.float64, device=world.device)
    if results:
        rows = [torch.stack([scalars[name] for name in names]) for scalars in results]
        table[mine.start : mine.stop, :-1] = torch.stack(rows)
        table[mine.start : mine.stop, -1] = torch.tensor(weights, dtype=torch.float64)
    communicator.all_reduce(table).wait()
    on_host = table.cpu()
    weight_column = on_host[:, -1:]
    # Without weight a mean may be 0/0, and counts for nothing.
    values = torch.where(weight_column > 0, on_host[:, :-1], 0.0)
    means = ((values * weight_column).sum(0) / weight_column.sum()).tolist()
    return means[0] if names == [UNNAMED] else dict(zip(names, means, strict=True))


def _as_scalars(result: Any, device: torch.device) -> dict[str, torch.Tensor]:
    named = result if isinstance(result, Mapping) and result else {UNNAMED: result}
    scalars = {}
    for name, value in named.items():
        if not (value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, Number)):
            shown = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(
                f"eval_fn returned {shown}{f' as {name!r}' if name else ''}: it must return one number, the mean over "
                "its micro-batch, or a dict of such numbers"
            )
        scalars[name] = torch.as_tensor(value, dtype=torch.float64, device=device).reshape(())
    return scalars


def _agree_on_names(results: list[dict[str, torch.Tensor]], communicator: Communicator) -> list[str]:
    """What eval_fn calls its results. A worker without a micro-batch cannot know: rank 0 always has one, and tells."""
    world = communicator.world
    names = list(results[0]) if world.is_main else []
    if world.size > 1:
        text = json.dumps(names).encode()
        size = torch.tensor([len(text)], device=world.device)
        communicator.broadcast(size, 0).wait()
        content = torch.zeros(int(size), dtype=torch.uint8, device=world.device)
        if world.is_main:
            content.copy_(torch.tensor(list(text), dtype=torch.uint8))
        communicator.broadcast(content, 0).wait()
        names = json.loads(bytes(content.tolist()))
    for scalars in results:
        if set(scalars) != set(names):
            raise ValueError(
                f"eval_fn returned {list(scalars)} for one micro-batch and {names} for another: it must always return "
                "the same names"
            )
    return names


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
