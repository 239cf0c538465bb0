"""Evaluation: every sample once, divided among all workers, with the same result on any number of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from typing import Any

import torch

from paceline.data.feeds.sharded import weight_of
from paceline.data.sources.base import Read
from paceline.run.evaluation.collect import gather
from paceline.run.evaluation.division import Division

# The name of a result that is one number.
UNNAMED = ""


def evaluate(
    model: Any, division: Division, eval_fn: Callable[[Any, Any], Any], weight_fn: Callable[[Any], int] | None
) -> float | dict[str, float]:
    """The mean of `eval_fn(model, batch)` over all samples, weighted like training.

    eval_fn returns a mean over its micro-batch: one number, or a dict of them. Every worker gets the results of all
    micro-batches, so that they are summed in the same order everywhere.
    """

    def result_of(read: Read) -> tuple[int, dict[str, torch.Tensor]]:
        if read.batch is None:  # collate_fn returned no sample
            return 0, {}
        weight = read.num_samples if weight_fn is None else weight_of(read.batch, weight_fn)
        return weight, _as_scalars(eval_fn(model, division.to_device(read.batch)), division.device)

    own = division.visit(model, division.mine, result_of, is_weighed=weight_fn is not None)
    zero = torch.zeros((), dtype=torch.float64, device=division.device)
    columns = {
        name: torch.stack([scalars.get(name, zero) for _, scalars in own]).cpu()
        for name in _common_names(scalars for _, scalars in own)
    }
    parts = gather((columns, [weight for weight, _ in own]), division.communicator)
    names = _common_names(columns for columns, _ in parts)
    if not names:
        raise ValueError("collate_fn left no sample of the data to evaluate: give it some that it keeps")
    rows = [
        torch.stack([columns[name] for name in names], 1) if columns else torch.zeros(len(own_weights), len(names))
        for columns, own_weights in parts
    ]
    weights = torch.tensor([[weight] for _, own_weights in parts for weight in own_weights], dtype=torch.float64)
    # A mean with weight 0 may be 0/0.
    values = torch.where(weights > 0, torch.cat(rows), 0.0)
    means = ((values * weights).sum(0) / weights.sum()).tolist()
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


def _common_names(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names that all results have, except empty ones."""
    first, *others = [list(result) for result in results if result] or [[]]
    for names in others:
        if set(names) != set(first):
            raise ValueError(
                f"eval_fn returned {names} for one micro-batch and {first} for another: it must always return the same "
                "names"
            )
    return first
