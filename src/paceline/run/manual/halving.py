"""Runs a micro-batch that does not fit in a device's memory in halves, quarters, ... down to single samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from paceline.data.feeds.device import map_items
from paceline.run.batch_norm import batch_norm_in_training


class FittingBackward:
    """Forward and backward of micro-batches, in parts if the device runs out of memory.

    Parts are weighted by their samples, so the gradient equals the whole micro-batch's to rounding. A size that fits is
    kept for the following steps.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._fitting: dict[torch.device, int] = {}

    def __call__(
        self,
        loss_of: Callable[[Any], torch.Tensor],
        batch: Any,
        num_samples: int,
        model: Any,
        device: torch.device,
        undo: Callable[[], None],
    ) -> torch.Tensor:
        """Add the gradient of the micro-batch's mean loss to the model's parameters and return the loss.

        `undo` is called after a failed attempt, to restore gradients and buffers.
        """
        size = min(num_samples, self._fitting.get(device, num_samples))
        while True:
            smaller = -(-size // 2)
            try:
                return _in_parts(loss_of, batch, num_samples, size)
            except torch.OutOfMemoryError as error:
                if size == 1:
                    error.add_note(f"a single sample does not fit in the memory of {device}")
                    raise
                if (obstacle := self._obstacle(model)) is not None:
                    raise torch.OutOfMemoryError(
                        f"nsamples={num_samples} samples do not fit in the memory of {device}, and cannot be run in "
                        f"parts, since {obstacle}: choose nsamples <= {smaller}"
                    ) from error
            # Outside of `except`, where the error would keep the failed attempt's tensors alive.
            undo()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if not self._fitting:
                warnings.warn(
                    f"{num_samples} samples at once do not fit in the memory of {device}: they are run in parts of at "
                    f"most {smaller}, with the same result to rounding. To avoid the failed attempts, choose "
                    f"nsamples={smaller} and more devices",
                    stacklevel=3,
                )
            self._fitting[device] = size = smaller

    def _obstacle(self, model: Any) -> str | None:
        """Why running parts would change the result; None if it would not."""
        if self._exact:
            return "exact=True runs every micro-batch alone"
        name = batch_norm_in_training(model)
        return None if name is None else f"the BatchNorm layer {name!r} would normalise the parts separately"


def _in_parts(loss_of: Callable[[Any], torch.Tensor], batch: Any, num_samples: int, size: int) -> torch.Tensor:
    losses = []
    for part, count in [(batch, num_samples)] if size == num_samples else parts(batch, num_samples, size):
        loss = loss_of(part) if count == num_samples else loss_of(part) * (count / num_samples)
        loss.backward()
        losses.append(loss.detach())
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def parts(batch: Any, num_samples: int, size: int) -> Iterator[tuple[Any, int]]:
    """The batch in parts of at most `size` samples, each with its number of samples.

    Values with one row per sample are cut: tensors, arrays and lists in nested tuples, lists, dicts and data classes.
    """
    for start in range(0, num_samples, size):
        rows = slice(start, min(start + size, num_samples))
        cut = partial(_cut, num_samples=num_samples, rows=rows)
        # A tuple at the top holds kinds of values, such as inputs and targets, even if it is as long as the batch.
        yield map_items(batch, cut) if type(batch) is tuple else cut(batch), rows.stop - rows.start


def _cut(value: Any, num_samples: int, rows: slice) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value[rows] if value.ndim and len(value) == num_samples else value
    is_plain = type(value) in (list, tuple) and not any(isinstance(item, torch.Tensor | np.ndarray) for item in value)
    if is_plain and len(value) == num_samples:
        return value[rows]
    return map_items(value, partial(_cut, num_samples=num_samples, rows=rows))
