"""How the trainer calls a model: a plain one for predictions, a head also for its loss."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from paceline.core.errors import MisuseError
from paceline.data.sources.base import Pair
from paceline.run.assemble import WeightByModel

# The label that losses of transformers ignore.
IGNORED = -100
# Heads whose loss is a plain mean over all labels, where they compute it themselves; decoders such as Bart's too.
_OVER_LABELS = ("ForMaskedLM", "ForTokenClassification", "ForCausalLM")
# Whether a loss function of transformers shifts the labels.
_IS_SHIFTED = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False, "ForTokenClassification": False}


def plain_prediction(model: Any, batch: Any) -> Any:
    """The output for a micro-batch of a model whose loss is computed outside of it."""
    inputs = batch.x if isinstance(batch, Pair) else batch
    return model(inputs) if callable(model) else model.forward(inputs)


def check_head(model: Any) -> None:
    """Refuse a model that cannot compute its loss, before the first step does."""
    if callable(getattr(model, "compute_loss", None)):
        return
    forward = getattr(model, "forward", model)
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    if not any(each.name == "labels" or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        raise TypeError(
            f"the head is a {type(model).__name__}, which has neither compute_loss(batch) nor a forward that takes "
            "labels, like models of transformers: add compute_loss, or use Trainer.setup and compute the loss in "
            "the loop"
        )


def weight_by_head(weight_fn: Callable[[Any], int] | None) -> WeightByModel:
    """The weight_fn of a head, which is checked once it is built."""

    def find(model: Any) -> Callable[[Any], int] | None:
        check_head(model)
        return weight_fn or weight_fn_of(model)

    return WeightByModel(find)


def head_loss(model: Any, batch: Any) -> torch.Tensor:
    """The mean loss of a model with `compute_loss(batch)`, or whose output has the loss, as in transformers."""
    if callable(compute := getattr(model, "compute_loss", None)):
        loss = compute(batch)
    else:
        loss = getattr(_call(model, batch), "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise MisuseError(
            f"the head, a {type(model).__name__}, returned no loss: it needs compute_loss(batch), or an output with "
            ".loss, for which batches of a transformers model must have labels"
        )
    return loss


def head_prediction(model: Any, batch: Any) -> Any:
    """The head's own `predict(batch)`, or its output without labels."""
    if callable(own := getattr(model, "predict", None)):
        return own(batch)
    if isinstance(batch, Mapping):
        batch = {name: value for name, value in batch.items() if name != "labels"}
    output = _call(model, batch)
    # Models of transformers name what is no prediction, such as the cache of keys and values.
    ignored = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ())
    if isinstance(output, Mapping) and dataclasses.is_dataclass(output):
        return dataclasses.replace(output, **{name: None for name in ignored if name in output})
    return output


def _call(model: Any, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, Mapping) else model(batch)


def _num_labels(batch: Any, *, model_name: str, is_shifted: bool) -> int:
    """The labels that the loss of a model of transformers is a mean over.

    is_shifted: the model predicts each label from what comes before it, so that a sequence's first does not count.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None:
        raise ValueError(
            f"a batch for {model_name} has no labels, which determine its weight: add labels, or pass a weight_fn that "
            "returns the number of items that a batch's loss is a mean over"
        )
    if is_shifted:
        # Where they are given shifted, the model takes these.
        labels = batch["shift_labels"] if batch.get("shift_labels") is not None else labels[..., 1:]
    return int((labels != IGNORED).sum())


def weight_fn_of(model: Any) -> Callable[[Any], int] | None:
    """The weight_fn of a transformers head, where its code shows what the loss is a mean over; None: its samples.

    transformers' models call `self.loss_function`, which says whether it shifts, or compute the loss in `forward`.
    """
    if type(model).__module__.partition(".")[0] == "peft":
        model = model.get_base_model()
    forward = getattr(type(model), "forward", None)
    bases = {(kind.__module__, kind.__name__) for kind in type(model).__mro__}  # without importing transformers
    is_transformers_model = ("transformers.modeling_utils", "PreTrainedModel") in bases
    if not is_transformers_model or forward is None or callable(getattr(model, "compute_loss", None)):
        return None
    forward = inspect.unwrap(forward)
    if forward.__module__.partition(".")[0] != "transformers":
        return None  # written by the user
    code, model_name = forward.__code__, type(model).__name__
    names = _names(code)
    ignores_others = "ignore_index" in names and IGNORED not in code.co_consts
    if ignores_others or any("shift_labels" in name or "codebook" in name for name in names):
        return None  # it treats labels in its own way
    is_shifted = None
    if "loss_function" in names:
        loss = model.loss_function
        if getattr(loss, "__module__", "").partition(".")[0] == "transformers":
            is_shifted = _IS_SHIFTED.get(loss.__name__)
    elif "CrossEntropyLoss" in names and (
        model_name.endswith(_OVER_LABELS)
        or (model_name.endswith("ForConditionalGeneration") and model.config.is_encoder_decoder)
    ):
        is_shifted = False
    return None if is_shifted is None else partial(_num_labels, model_name=model_name, is_shifted=is_shifted)


def _names(code: Any) -> set[str]:
    """Names that a function uses: variables, attributes, and keywords of its calls."""
    keywords = (name for constant in code.co_consts if isinstance(constant, tuple) for name in constant)
    return {*code.co_names, *code.co_varnames, *(name for name in keywords if isinstance(name, str))}
