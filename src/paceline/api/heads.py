"""How the trainer calls a model by itself: a plain one for predictions, a head also for its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from paceline.core.errors import MisuseError
from paceline.data.sources import Pair


class Calling(Protocol):
    """Ways to call a model with a micro-batch."""

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        """The micro-batch's mean loss."""

    def predict(self, model: Any, batch: Any) -> Any:
        """What the model makes of each of its samples."""


class PlainModel:
    """A model whose loss is computed outside of it."""

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        raise MisuseError(
            "loss() needs a model that computes its own loss: make the trainer with Trainer.setup_head, or compute the "
            "loss from trainer.model"
        )

    def predict(self, model: Any, batch: Any) -> Any:
        inputs = batch.x if isinstance(batch, Pair) else batch
        return model(inputs) if callable(model) else model.forward(inputs)


class Head:
    """A model with `compute_loss(batch)`, or one whose output has the loss, as those of transformers do."""

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        if callable(compute := getattr(model, "compute_loss", None)):
            loss = compute(batch)
        else:
            loss = getattr(_call(model, batch), "loss", None)
        if not isinstance(loss, torch.Tensor):
            raise MisuseError(
                f"the head, a {type(model).__name__}, gave no loss: it needs compute_loss(batch), or an output with "
                ".loss, for which batches of a transformers model must have labels"
            )
        return loss

    def predict(self, model: Any, batch: Any) -> Any:
        if callable(own := getattr(model, "predict", None)):
            return own(batch)
        if isinstance(batch, Mapping):
            batch = {name: value for name, value in batch.items() if name != "labels"}
        return _call(model, batch)


def _call(model: Any, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, Mapping) else model(batch)
