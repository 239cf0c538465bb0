"""How good a model is on data it was not trained on: its mean loss, and for a classifier how often it is right."""

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
    """After `step` steps, in `epoch` (from 0): the mean loss, and by k the part of samples with the label in the top k.

    `accuracy` is empty where outputs and targets are not those of a classifier.
    """

    step: int
    epoch: int
    loss: float
    accuracy: Mapping[int, float]

    def __str__(self) -> str:
        shown = "".join(f"  top-{k} {part:.1%}" for k, part in self.accuracy.items())
        return f"step {self.step}  validation loss {self.loss:.6g}{shown}"


class Validator:
    """Validates a model over all of a source, which the workers of the world divide among themselves.

    forward_fn(model, batch) gives output and target, loss_fn(output, target) their loss.
    """

    def __init__(
        self,
        source: Source,
        forward_fn: Callable[[Any, Any], tuple[Any, Any]],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        communicator: Communicator,
        *,
        topk: Sequence[int],
        micro_batch: int,
        seed: int,
    ) -> None:
        self._source = source
        self._forward_fn = forward_fn
        self._loss_fn = loss_fn
        self._communicator = communicator
        self._topk = checked_topk(topk)
        self._micro_batch = micro_batch
        self._seed = seed

    def __call__(self, model: Any, step: int, epoch: int) -> Validation:
        means = evaluate(
            model,
            self._source,
            self._measure,
            self._communicator,
            micro_batch=self._micro_batch,
            seed=self._seed,
            weight_fn=None,
        )
        assert isinstance(means, dict)
        loss = means.pop(LOSS)
        return Validation(step, epoch, loss, {int(k): part for k, part in means.items()})

    def _measure(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        output, target = self._forward_fn(model, batch)
        measured = {LOSS: self._loss_fn(output, target)}
        if is_classification(output, target):
            measured |= {str(k): part for k, part in topk_accuracy(output, target, self._topk).items()}
        return measured


def checked_topk(topk: Sequence[int]) -> tuple[int, ...]:
    for k in topk:
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"topk={tuple(topk)}: {k!r} is no number of guesses; choose whole numbers >= 1")
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
    """By k, the part of samples whose class is among the k highest scores; a k above the number of classes is left out.

    output: (samples, classes). target: (samples,) class numbers; a sample with any other number is a miss. Of equal
    scores the others count as higher, and so does NaN: a model that does not tell classes apart gets no credit.
    """
    num_classes, target = output.shape[1], target.to(output.device)
    own = output.gather(1, target.clamp(0, num_classes - 1).unsqueeze(1))
    num_higher = (~(output < own)).sum(1) - 1
    is_class = (target >= 0) & (target < num_classes)
    return {k: (is_class & (num_higher < k)).double().mean() for k in topk if k <= num_classes}
