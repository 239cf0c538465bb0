"""Validation: the mean loss over data, and top-k accuracy for classifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.data.sources.base import Source
from paceline.run.evaluation.evaluate import evaluate

LOSS = "loss"


@dataclass(frozen=True)
class Validation:
    """After `step` steps, in `epoch` (from 0): the mean loss and, by k, the fraction of samples in the top k.

    `accuracy` is empty where outputs and targets are not those of a classifier.
    """

    step: int
    epoch: int
    loss: float
    accuracy: Mapping[int, float]

    def __str__(self) -> str:
        shown = "".join(f"  top-{k} {part:.1%}" for k, part in self.accuracy.items())
        return f"step {self.step}  validation loss {self.loss:.6g}{shown}"


def validate(
    model: Any,
    step: int,
    epoch: int,
    *,
    source: Source,
    forward_fn: Callable[[Any, Any], tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    topk: Sequence[int],
    communicator: Communicator,
    micro_batch: int,
    seed: int,
) -> Validation:
    """Validate a model over all of a source, divided among the workers of the world.

    forward_fn(model, batch) returns output and target, loss_fn(output, target) their loss.
    """

    def measure(model: Any, batch: Any) -> dict[str, torch.Tensor]:
        output, target = forward_fn(model, batch)
        measured = {LOSS: loss_fn(output, target)}
        if is_classification(output, target):
            measured |= {str(k): part for k, part in topk_accuracy(output, target, topk).items()}
        return measured

    means = evaluate(model, source, measure, communicator, micro_batch=micro_batch, seed=seed, weight_fn=None)
    assert isinstance(means, dict)
    loss = means.pop(LOSS)
    return Validation(step, epoch, loss, {int(k): part for k, part in means.items()})


def checked_topk(topk: Sequence[int]) -> tuple[int, ...]:
    for k in topk:
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"topk={tuple(topk)}: {k!r} must be a whole number >= 1")
    return tuple(topk)


def is_classification(output: Any, target: Any) -> bool:
    """Whether `output` holds a score for each class and `target` one class number for each sample."""
    return (
        isinstance(output, torch.Tensor)
        and isinstance(target, torch.Tensor)
        and output.ndim == 2
        and target.shape == output.shape[:1]
        and not target.is_floating_point()
    )


def topk_accuracy(output: torch.Tensor, target: torch.Tensor, topk: Sequence[int]) -> dict[int, torch.Tensor]:
    """By k, the fraction of samples whose class is among the k highest scores, for each k up to the number of classes.

    output: (samples, classes). target: (samples,) class numbers; a number out of range is a miss. Equal scores and NaN
    count as higher than the sample's own, so that a constant model has accuracy 0.
    """
    num_classes, target = output.shape[1], target.to(output.device)
    own = output.gather(1, target.clamp(0, num_classes - 1).unsqueeze(1))
    num_higher = (~(output < own)).sum(1) - 1
    is_class = (target >= 0) & (target < num_classes)
    return {k: (is_class & (num_higher < k)).double().mean() for k in topk if k <= num_classes}
