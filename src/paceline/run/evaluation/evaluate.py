"""Evaluation: every sample once, divided among all workers, with the same result on any number of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.data.feeds.device import DeviceCopier
from paceline.data.feeds.sharded import weight_of
from paceline.data.sources.base import Read, Source
from paceline.run.evaluation.division import Division

# The name of a result that is one number.
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

    eval_fn returns a mean over its micro-batch: one number, or a dict of them. Workers exchange a table with one row
    per micro-batch, so that the mean is summed in the same order everywhere.
    """
    world = communicator.world
    division = Division(source, micro_batch, world, seed=seed, function="eval_fn", is_weighed=weight_fn is not None)
    to_device = DeviceCopier(world.device)
    weights: list[int] = []

    def result_of(read: Read) -> dict[str, torch.Tensor] | None:
        if read.batch is None:  # collate_fn returned no sample
            weights.append(0)
            return None
        weights.append(read.num_samples if weight_fn is None else weight_of(read.batch, weight_fn))
        return _as_scalars(eval_fn(model, to_device(read.batch)), world.device)

    mine = division.mine
    results = division.visit(model, mine, result_of)
    names = _agree_on_names(results, communicator)
    table = torch.zeros(division.num_micro_batches, len(names) + 1, dtype=torch.float64, device=world.device)
    if results:
        nothing = torch.zeros(len(names), dtype=torch.float64, device=world.device)
        rows = [nothing if row is None else torch.stack([row[name] for name in names]) for row in results]
        table[mine.start : mine.stop, :-1] = torch.stack(rows)
        table[mine.start : mine.stop, -1] = torch.tensor(weights, dtype=torch.float64)
    communicator.all_reduce(table).wait()
    on_host = table.cpu()
    weight_column = on_host[:, -1:]
    # A mean with weight 0 may be 0/0.
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


def _agree_on_names(results: list[dict[str, torch.Tensor] | None], communicator: Communicator) -> list[str]:
    """The names of eval_fn's results, from the first worker that has a micro-batch."""
    called = [scalars for scalars in results if scalars is not None]
    answers = [text for text in gather(json.dumps(list(called[0])) if called else "", communicator) if text]
    if not answers:
        raise ValueError("collate_fn left no sample of the data to evaluate: give it some that it keeps")
    names: list[str] = json.loads(answers[0])
    for scalars in called:
        if set(scalars) != set(names):
            raise ValueError(
                f"eval_fn returned {list(scalars)} for one micro-batch and {names} for another: it must always return "
                "the same names"
            )
    return names
