"""The buffers of a model, which forward passes change.

Every micro-batch of a step starts from the same buffers. Its changes are combined afterwards, so that the result
depends on the micro-batches and not on the workers that ran them:

- statistics of BatchNorm and similar layers change as if the micro-batches had run one after another:
  new = old + sum_k (1 - momentum)**(M-1-k) * (after_k - old), a running average (momentum=None) by its counter;
- batch counters are summed;
- any other buffer takes the value of the step's last micro-batch, with one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.comm.base import Communicator


class Buffers:
    """The buffers of a model, combined over the micro-batches of a step.

    `numel` numbers are exchanged with the gradients, in the memory given to `accumulate_in`, and `num_unmanaged` flags
    that say whether a buffer without a rule changed. In exact mode each statistic has a grid.
    """

    def __init__(self, model: object, communicator: Communicator) -> None:
        modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
        self._statistics = _Statistics(modules)
        self._others = [
            _Unmanaged(f"{path}.{key}".lstrip("."), module, key)
            for path, module in modules.items()
            for key, tensor in module._buffers.items()
            if tensor is not None and module not in self._statistics.modules
        ]
        self._communicator = communicator
        self.numel = self._statistics.numel
        self.num_unmanaged = len(self._others)

    @property
    def names_of_statistics(self) -> list[str]:
        return self._statistics.names

    def accumulate_in(self, space: torch.Tensor, *, exact: bool) -> None:
        self._space = space
        self._anchors = torch.ones_like(space) if exact else None

    def set_anchors(self, anchors: np.ndarray) -> None:
        """The anchors of the statistics' grids."""
        if self._anchors is not None and self.numel:
            self._anchors.copy_(torch.from_numpy(np.repeat(anchors, self._statistics.sizes)))

    def begin_step(self, num_micro_batches: int) -> None:
        self._num_micro_batches = num_micro_batches
        if self.numel:
            self._space.zero_()
            self._before = self._statistics.read()
        for other in self._others:
            other.begin_step()

    def change(self, number: int) -> torch.Tensor | None:
        """This micro-batch's weighted change of the statistics, which are then restored."""
        for other in self._others:
            other.end_micro_batch(keep=number == self._num_micro_batches - 1)
        if not self.numel:
            return None
        change = (self._statistics.read() - self._before).mul_(
            self._statistics.weights(self._before, number, self._num_micro_batches)
        )
        self._statistics.write(self._before)
        return change

    def add(self, change: torch.Tensor) -> torch.Tensor | None:
        """Add a change to the step's sum. Returns the largest magnitude of each statistic in exact mode."""
        peaks = self.peaks_of(change) if self._anchors is not None else None
        self._space.add_(change if self._anchors is None else change.add(self._anchors).sub_(self._anchors))
        return peaks

    def peaks_of(self, change: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of each statistic; NaN if there is a NaN."""
        return torch.stack([part.abs().amax() for part in change.split(self._statistics.sizes)])

    def changed_unmanaged(self) -> Sequence[bool]:
        return [other.is_changed for other in self._others]

    def finish(self, changed: Sequence[float], owner_of_last: int) -> None:
        """After the exchange: write the combined values. owner_of_last: the rank that ran the last micro-batch."""
        if self.numel:
            self._statistics.write(self._before + self._space)
        for other, is_changed in zip(self._others, changed, strict=True):
            if is_changed:
                other.take(self._communicator, owner_of_last)

    def restore(self) -> None:
        """Restore the buffers that the step began with."""
        if self.numel:
            self._statistics.write(self._before)
        for other in self._others:
            other.end_micro_batch(keep=False)


def statistics_of(model: object) -> list[torch.Tensor]:
    """The running statistics and counters of the model's normalization layers."""
    return _Statistics(dict(model.named_modules()) if isinstance(model, nn.Module) else {}).tensors


class _Statistics:
    """The running statistics and counters of all normalization layers, as one float64 vector."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        found = {name: m for name, m in modules.items() if isinstance(m, _NormBase) and m.running_mean is not None}
        self.modules = list(found.values())
        keys = ("running_mean", "running_var", "num_batches_tracked")
        self.names = [f"{name}.{key}".lstrip(".") for name in found for key in keys]
        self.tensors: list[torch.Tensor] = []
        keeps: list[torch.Tensor] = []  # per element: the part of the old value that remains after one batch
        averages: list[torch.Tensor] = []  # per element: the index of its counter if it is a running average, else -1
        end = 0
        for module in self.modules:
            mean, variance, counter = module.running_mean, module.running_var, module.num_batches_tracked
            assert mean is not None
            assert variance is not None
            assert counter is not None
            size = 2 * mean.numel()
            self.tensors += [mean, variance, counter]
            keeps.append(torch.full((size + 1,), 1.0 - (module.momentum or 0.0), dtype=torch.float64))
            keeps[-1][size] = 1.0  # counters add up
            averages.append(torch.full((size + 1,), end + size if module.momentum is None else -1))
            averages[-1][size] = -1
            end += size + 1
        self.numel = end
        self.sizes = [tensor.numel() for tensor in self.tensors]
        if end:
            device = self.tensors[0].device
            self._keep = torch.cat(keeps).to(device)
            self._counter = torch.cat(averages).to(device)
            self._has_averages = any(module.momentum is None for module in self.modules)

    def read(self) -> torch.Tensor:
        return torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in self.tensors])

    def write(self, values: torch.Tensor) -> None:
        for tensor, part in zip(self.tensors, torch.split(values, self.sizes), strict=True):
            tensor.copy_(part.view_as(tensor))

    def weights(self, before: torch.Tensor, number: int, num_micro_batches: int) -> torch.Tensor:
        """The part of micro-batch `number`'s change that remains after the later ones."""
        weights = self._keep ** (num_micro_batches - 1 - number)
        if self._has_averages:
            count = before[self._counter.clamp(min=0)]
            averaged = (count + 1.0) / (count + num_micro_batches)
            weights = torch.where(self._counter >= 0, averaged, weights)
        return weights


class _Unmanaged:
    """A buffer without a rule. Most never change: checking them costs a comparison."""

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name = name
        self._buffers = cast("dict[str, torch.Tensor]", module._buffers)
        self._key = key
        self._tensor = self._buffers[key]
        self._before = self._tensor.clone()
        self._version = self._tensor._version
        self._last: torch.Tensor | None = None
        self._has_warned = False
        self.is_changed = False

    def begin_step(self) -> None:
        self.is_changed = False
        self._last = None
        current = self._buffers[self._key]
        if current is not self._tensor or current._version != self._version:
            # Changed between two steps, by a hook or by the user.
            self._tensor, self._before = current, current.clone()
            self._version = current._version

    def end_micro_batch(self, *, keep: bool) -> None:
        current = self._buffers[self._key]
        if current is self._tensor and current._version == self._version:
            return
        if current.shape != self._before.shape or current.dtype != self._before.dtype:
            # A cache that grew with its input: each worker keeps its own.
            self._tensor, self._before, self._version = current, current.clone(), current._version
            return
        self._warn_once()
        self.is_changed = True
        if keep:
            self._last = current.clone()
        self._put(self._before)

    def take(self, communicator: Communicator, owner: int) -> None:
        value = self._before.clone() if self._last is None else self._last
        if value.dtype == torch.bool:
            carrier = value.to(torch.uint8)
            communicator.broadcast(carrier, owner).wait()
            value = carrier.to(torch.bool)
        else:
            communicator.broadcast(value, owner).wait()
        self._before = value
        self._put(value)

    def _put(self, value: torch.Tensor) -> None:
        self._tensor.copy_(value)
        self._buffers[self._key] = self._tensor
        self._version = self._tensor._version

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"buffer {self.name!r} changes during forward and is not a statistic that Paceline can combine: "
                "after each step it has the value of the step's last micro-batch",
                stacklevel=2,
            )
