"""Validation: the mean loss over data, and top-k accuracy for classifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Validation:
    """After `step` steps, in `epoch` (from 0): the mean loss and, by k, the fraction of samples in the top k.

    `accuracy` is empty where outputs and targets are not those of a classifier.
    """

    step: int
    epoch: int
    loss: float
    accuracy: Mapping[int, float]

    @classmethod
    def of(cls, step: int, epoch: int, means: Any) -> Validation:
        """means: of the numbers of `loss_and_accuracy`."""
        return cls(step, epoch, means["loss"], {int(k): part for k, part in means.items() if k != "loss"})

    def __str__(self) -> str:
        shown = "".join(f"  top-{k} {part:.1%}" for k, part in self.accuracy.items())
        return f"step {self.step}  validation loss {self.loss:.6g}{shown}"


def loss_and_accuracy(
    model: Any,
    batch: Any,
    *,
    forward_fn: Callable[[Any, Any], tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    topk: Sequence[int],
) -> dict[str, torch.Tensor]:
    """The mean loss of a batch and, for a classifier, its accuracy by k.

    forward_fn(model, batch) returns output and target, loss_fn(output, target) their loss.
    """
    output, target = forward_fn(model, batch)
    measured = {"loss": loss_fn(output, target)}
    # A score for each class, and one class number for each sample.
    is_classifier = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor) and output.ndim == 2
    if is_classifier and target.shape == output.shape[:1] and not target.is_floating_point():
        measured |= {str(k): part for k, part in topk_accuracy(output, target, topk).items()}
    return measured


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
