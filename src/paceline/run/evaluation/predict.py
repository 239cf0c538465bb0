"""Prediction: the model's outputs for every sample, in the data's order, computed by all workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from paceline.data.feeds.device import map_items
from paceline.data.sources.base import Read
from paceline.run.evaluation.collect import gather
from paceline.run.evaluation.evaluate import EvaluationData

# One row or item per sample.
Column = torch.Tensor | list[Any]


def predict(model: Any, data: EvaluationData, fn: Callable[[Any, Any], Any]) -> Any:
    """The results of `fn(model, batch)` for all samples, on every worker's host.

    fn returns tensors with a row per sample of its micro-batch or lists with an item per sample, alone or in tuples,
    dicts and dataclasses. Tensors whose rows differ in shape come back as a list of rows.
    """

    def predict_one(read: Read, batch: Any, num_samples: int) -> tuple[Any, list[Column]]:
        if read.skipped:
            bad = read.skipped[0]
            raise ValueError(f"sample {bad.index} is bad, so predictions would not line up with the data: {bad.error}")
        if batch is None:
            raise ValueError(
                "collate_fn left no sample of a micro-batch, so predictions would not line up with the data: give "
                "predict() data or a collate_fn that leaves nothing out"
            )
        return _split(fn(model, batch), num_samples)

    # A worker without a share runs the first micro-batch to learn the structure of the outputs. Samples are not counted
    # here: `_column` checks the number of rows.
    outputs = data.visit(model, data.mine or range(1), predict_one, None, is_weighed=True)
    structure = outputs[0][0]
    differ = ValueError(
        "fn returned outputs of different structure for different micro-batches: it must return the same for all"
    )
    if any(other != structure for other, _ in outputs):
        raise differ
    own = _joined([columns for _, columns in outputs]) if data.mine else None
    parts = [part for part in gather(own, data.communicator) if part is not None]
    if len(set(map(len, parts))) > 1:
        raise differ
    columns = _joined(parts)

    def filled(value: Any) -> Any:
        return columns[value.number] if isinstance(value, _ColumnNumber) else map_items(value, filled)

    return filled(structure)


@dataclasses.dataclass(frozen=True)
class _ColumnNumber:
    """Stands for a column in the structure of an output."""

    number: int


def _split(output: Any, num_samples: int) -> tuple[Any, list[Column]]:
    """The output's structure, with column numbers in place of tensors and lists, and its columns."""
    columns: list[Column] = []

    def visit(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, torch.Tensor | list):
            columns.append(_column(value, num_samples))
            return _ColumnNumber(len(columns) - 1)
        rebuilt = map_items(value, visit)
        if rebuilt is value:
            raise TypeError(
                f"fn returned a {type(value).__name__}: it must return tensors with a row, or lists with an item, per "
                "sample, alone or in tuples, dicts and dataclasses"
            )
        return rebuilt

    return visit(output), columns


def _column(value: Column, num_samples: int) -> Column:
    if isinstance(value, torch.Tensor):
        has_all, shown = value.shape[:1] == (num_samples,), f"a tensor of shape {tuple(value.shape)}"
    else:
        has_all, shown = len(value) == num_samples, f"a list of {len(value)} items"
    if not has_all:
        raise ValueError(
            f"fn returned {shown} for a micro-batch of {num_samples} samples: return one row or item per sample"
        )
    column: Column = _on_host(value)
    return column


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else map_items(value, _on_host)


def _joined(parts: list[list[Column]]) -> list[Column]:
    """Join the columns of consecutive samples: a tensor if all rows have one shape and dtype, else a list of rows."""

    def join(column: tuple[Column, ...]) -> Column:
        tensors = [part for part in column if isinstance(part, torch.Tensor)]
        if len(tensors) == len(column) and len({(part.shape[1:], part.dtype) for part in tensors}) == 1:
            return torch.cat(tensors)
        return [row for part in column for row in part]

    return [join(column) for column in zip(*parts, strict=True)]
