"""A micro-batch that does not fit in a device's memory is run in halves, or in quarters, down to single samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn


class FittingBackward:
    """Forward and backward of micro-batches, each in as few parts as its device has memory for.

    Parts are weighted by their samples, so the gradient is that of the whole to rounding. The size that fitted is
    kept: what ran out of memory once would do so in every step.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._fitting: dict[torch.device, int] = {}

    def __call__(
        self,
        loss_of: Callable[[Any], torch.Tensor],
        batch: Any,
        num_samples: int,
        *,
        model: Any,
        device: torch.device,
        undo: Callable[[], None],
    ) -> torch.Tensor:
        """Add the gradient of the micro-batch's mean loss to the model's parameters; returns that loss.

        `undo` is called when an attempt has failed, to remove what it has left in gradients and buffers.
        """
        size = min(num_samples, self._fitting.get(device, num_samples))
        while True:
            try:
                return _in_parts(loss_of, batch, num_samples, size)
            except torch.OutOfMemoryError as error:
                self._check_may_divide(num_samples, size, model, device, error)
            # Outside of `except`, where the error would keep the failed attempt's tensors alive.
            undo()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            size = -(-size // 2)
            self._warn_once(num_samples, size, device)
            self._fitting[device] = size

    def _warn_once(self, num_samples: int, size: int, device: torch.device) -> None:
        if not self._fitting:
            warnings.warn(
                f"{num_samples} samples at once do not fit in the memory of {device}: they are run in parts of {size} "
                f"or less, with the same result to rounding. nsamples={size}, with more devices for steps as large, "
                "would spare the detour",
                stacklevel=5,
            )

    def _check_may_divide(
        self, num_samples: int, size: int, model: Any, device: torch.device, error: torch.OutOfMemoryError
    ) -> None:
        if size == 1:
            error.add_note(f"a single sample does not fit in the memory of {device}")
            raise error
        if self._exact:
            reason = "exact=True runs every micro-batch by itself"
        elif (name := batch_norm_in_training(model)) is not None:
            reason = f"parts of it would be normalised apart by the BatchNorm layer {name!r}"
        else:
            return
        raise torch.OutOfMemoryError(
            f"nsamples={num_samples} samples do not fit in the memory of {device}, and cannot be run in parts, since "
            f"{reason}: choose nsamples <= {-(-size // 2)}"
        ) from error


def _in_parts(loss_of: Callable[[Any], torch.Tensor], batch: Any, num_samples: int, size: int) -> torch.Tensor:
    if size == num_samples:
        loss = loss_of(batch)
        loss.backward()
        return loss.detach()
    losses = []
    for part, count in parts(batch, num_samples, size):
        loss = loss_of(part) * (count / num_samples)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def parts(batch: Any, num_samples: int, size: int) -> Iterator[tuple[Any, int]]:
    """The batch cut into parts of at most `size` samples, and how many each has.

    Whatever has one row per sample is cut: tensors, arrays and lists in nested tuples, lists and dicts.
    """
    for start in range(0, num_samples, size):
        rows = slice(start, min(start + size, num_samples))
        yield _cut(batch, num_samples, rows), rows.stop - rows.start


def _cut(value: Any, num_samples: int, rows: slice) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value[rows] if value.ndim and len(value) == num_samples else value
    if isinstance(value, Mapping):
        return {key: _cut(item, num_samples, rows) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_cut(item, num_samples, rows) for item in value)
    if isinstance(value, list | tuple):
        if len(value) == num_samples and not any(isinstance(item, torch.Tensor | np.ndarray) for item in value):
            return value[rows]
        return type(value)(_cut(item, num_samples, rows) for item in value)
    return value


def batch_norm_in_training(model: Any) -> str | None:
    """The name of the first BatchNorm layer that is in training mode, if there is one."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return str(name)
    return None
