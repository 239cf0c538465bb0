"""The buffers of a model, which forward passes change.

Every micro-batch of a step starts from the same buffers. Its changes are combined afterwards, so that the result
depends on the micro-batches and not on the workers that ran them:

- statistics of BatchNorm and similar layers change as if the micro-batches had run one after another:
  new = old + sum_k (1 - momentum)**(M-1-k) * (after_k - old), a running average (momentum=None) by its counter;
- batch counters are summed;
- any other buffer takes the value of the step's last micro-batch, with one warning;
- while its size differs between workers, each keeps its own: a cache that grows, or activations of the last batch.
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
from paceline.comm.messages import gather

# In the exchanged flag of a buffer, besides 1 for each worker on which it changed: a worker has seen it change its
# size, so sizes may differ between workers.
_RESIZED = 4096.0
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Buffers:
    """The buffers of a model, combined over the micro-batches of a step.

    `numel` numbers are exchanged with the gradients, in the memory given to `accumulate_in`, and `num_unmanaged` flags
    that say whether a buffer without a rule changed. In exact mode each statistic has a grid.
    """

    def __init__(self, model: object, communicator: Communicator) -> None:
        self._model = model
        self._communicator = communicator
        layers = _normalization_layers(model)
        self._layers = list(layers.values())
        self.names_of_statistics = [f"{name}.{key}".lstrip(".") for name in layers for key in _STATISTICS]
        self._others = [buffer for buffer in _buffers_of(model) if not buffer.is_statistic]
        self.num_unmanaged = len(self._others)
        self._note_layers()
        self.numel = sum(self._sizes)

    def _note_layers(self) -> None:
        """Note the layers' momentum and statistics, which the user may replace between two steps."""
        self._last_layer_states = self._layer_states()
        self._statistics = statistics_of(self._model)
        self._sizes = [tensor.numel() for tensor in self._statistics]
        keeps: list[float] = []  # by statistic: the part of the old value that remains after one batch
        counters: list[int] = []  # by statistic: the index of its counter if it is a running average, else -1
        for number, layer in enumerate(self._layers):
            counter = sum(self._sizes[: 3 * number + 2]) if layer.momentum is None else -1
            keeps += [1.0 - (layer.momentum or 0.0)] * 2 + [1.0]  # counters add up
            counters += [counter, counter, -1]
        sizes = torch.tensor(self._sizes, dtype=torch.int64)
        device = self._statistics[0].device if self._layers else None
        self._keep = torch.tensor(keeps, dtype=torch.float64).repeat_interleave(sizes).to(device=device)
        self._counter = torch.tensor(counters, dtype=torch.int64).repeat_interleave(sizes).to(device=device)
        self._has_averages = max(counters, default=-1) >= 0

    def _layer_states(self) -> list[tuple[float | None, ...]]:
        return [(layer.momentum, *map(id, layer._buffers.values())) for layer in self._layers]

    def renewed(self) -> Buffers:
        """For the present modules of the model."""
        renewed = Buffers(self._model, self._communicator)
        known = {other.name: other for other in self._others}
        for other in renewed._others:
            if (before := known.get(other.name)) is not None:
                other.was_resized, other.has_warned = before.was_resized, before.has_warned
        return renewed

    def accumulate_in(self, space: torch.Tensor, *, exact: bool) -> None:
        self._space = space
        self._anchors = torch.ones_like(space) if exact else None

    def set_anchors(self, anchors: np.ndarray) -> None:
        """The anchors of the statistics' grids."""
        if self._anchors is not None and self.numel:
            self._anchors.copy_(torch.from_numpy(np.repeat(anchors, self._sizes)))

    def begin_step(self, num_micro_batches: int) -> None:
        self._num_micro_batches = num_micro_batches
        if self.numel:
            if self._layer_states() != self._last_layer_states:
                self._note_layers()
            self._space.zero_()
            self._before = self._read()
        for other in self._others:
            other.begin_step()

    def change(self, number: int) -> torch.Tensor | None:
        """This micro-batch's weighted change of the statistics, which are then restored."""
        for other in self._others:
            other.end_micro_batch(keep=number == self._num_micro_batches - 1)
        if not self.numel:
            return None
        change = (self._read() - self._before).mul_(self._weights(number))
        self._write(self._before)
        return change

    def add(self, change: torch.Tensor) -> torch.Tensor | None:
        """Add a change to the step's sum. Returns the largest magnitude of each statistic in exact mode."""
        if self._anchors is None:
            self._space.add_(change)
            return None
        self._space.add_(change.add(self._anchors).sub_(self._anchors))
        return self.peaks_of(change)

    def peaks_of(self, change: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of each statistic; NaN if there is a NaN."""
        return torch.stack([part.abs().amax() for part in change.split(self._sizes)])

    def changed_unmanaged(self) -> Sequence[float]:
        """By buffer without a rule: this worker's part of its exchanged flag."""
        return [other.is_changed + _RESIZED * other.was_resized for other in self._others]

    @staticmethod
    def have_changed(flags: Sequence[float]) -> bool:
        """Whether forward changed a buffer without a rule, other than its size."""
        return any(flag % _RESIZED for flag in flags)

    def finish(self, changed: Sequence[float], owner_of_last: int) -> None:
        """After the exchange: write the combined values. owner_of_last: the rank that ran the last micro-batch."""
        if self.numel:
            self._write(self._before + self._space)
        for other, flag in zip(self._others, changed, strict=True):
            other.was_resized |= flag >= _RESIZED
            if flag % _RESIZED and not (other.was_resized and self._have_other_sizes(other)):
                other.take(self._communicator, owner_of_last)

    def _have_other_sizes(self, other: _Buffer) -> bool:
        """Whether the workers' sizes of a buffer differ. Called by all together."""
        return len(set(gather(other.size, self._communicator))) > 1

    def restore(self) -> None:
        """Restore the buffers that the step began with."""
        if self.numel:
            self._write(self._before)
        for other in self._others:
            other.end_micro_batch(keep=False)

    def _read(self) -> torch.Tensor:
        return torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in self._statistics])

    def _write(self, values: torch.Tensor) -> None:
        for tensor, part in zip(self._statistics, torch.split(values, self._sizes), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _weights(self, number: int) -> torch.Tensor:
        """The part of micro-batch `number`'s change that remains after the later ones."""
        weights = self._keep ** (self._num_micro_batches - 1 - number)
        if self._has_averages:
            count = self._before[self._counter.clamp(min=0)]
            averaged = (count + 1.0) / (count + self._num_micro_batches)
            weights = torch.where(self._counter >= 0, averaged, weights)
        return weights


class BufferWatch:
    """Finds the changes that a forward pass makes to a model's buffers, and can undo them."""

    def __init__(self, model: object) -> None:
        self._buffers = {buffer.name: buffer for buffer in _buffers_of(model)}

    def begin(self) -> None:
        """Call before a forward pass: remembers the current buffers."""
        for buffer in self._changed().values():
            buffer.note()

    def changed(self) -> dict[str, torch.Tensor]:
        """The buffers that were written or replaced since `begin`, and all running statistics."""
        return {name: buffer.current for name, buffer in self._changed().items()}

    @torch.no_grad()
    def take(self) -> dict[str, torch.Tensor]:
        """Restore the changed buffers and return their new values.

        A buffer whose size changed, such as a growing cache, is left alone.
        """
        changed = {name: buffer for name, buffer in self._changed().items() if not buffer.is_incompatible()}
        values = {name: buffer.current.clone() for name, buffer in changed.items()}
        for buffer in changed.values():
            buffer.restore()
        return values

    @torch.no_grad()
    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            self._buffers[name].current.copy_(value)

    def _changed(self) -> dict[str, _Buffer]:
        return {name: buffer for name, buffer in self._buffers.items() if buffer.has_changed()}


def statistics_of(model: object) -> list[torch.Tensor]:
    """The running statistics and counters of the model's normalization layers."""
    return [getattr(layer, key) for layer in _normalization_layers(model).values() for key in _STATISTICS]


def _normalization_layers(model: object) -> dict[str, _NormBase]:
    """The layers with running statistics."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return {name: m for name, m in modules if isinstance(m, _NormBase) and m.running_mean is not None}


def _buffers_of(model: object) -> list[_Buffer]:
    layers = _normalization_layers(model)
    return [
        _Buffer(f"{path}.{key}".lstrip("."), module, key, is_statistic=path in layers)
        for path, module in (model.named_modules() if isinstance(model, nn.Module) else ())
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]


class _Buffer:
    """A buffer of a module, and its value when it was last noted. Most never change: checking costs a comparison."""

    def __init__(self, name: str, module: nn.Module, key: str, *, is_statistic: bool) -> None:
        self.name = name
        self.is_statistic = is_statistic
        self.is_changed = self.was_resized = self.has_warned = False
        self._buffers = cast("dict[str, torch.Tensor]", module._buffers)
        self._key = key
        self._last: torch.Tensor | None = None
        self.note()

    @property
    def current(self) -> torch.Tensor:
        return self._buffers[self._key]

    def has_changed(self) -> bool:
        """Whether it was written or replaced. Running statistics may always be: their kernels count no version."""
        current = self._buffers[self._key]
        return current is not self._tensor or current._version != self._version or self.is_statistic

    @property
    def size(self) -> str:
        return f"{tuple(self._noted.shape)} {self._noted.dtype}"

    def is_incompatible(self) -> bool:
        """Whether its shape or dtype differs from the noted value, as of a cache that grows with its input."""
        return self.current.shape != self._noted.shape or self.current.dtype != self._noted.dtype

    def note(self) -> None:
        self._tensor, self._noted, self._version = self.current, self.current.clone(), self.current._version

    def restore(self) -> None:
        """Set it to the value noted last."""
        self._tensor.copy_(self._noted)
        self._buffers[self._key] = self._tensor
        self._version = self._tensor._version

    def begin_step(self) -> None:
        self.is_changed = False
        self._last = None
        if self.has_changed():  # between two steps, by a hook or by the user
            self.note()

    def end_micro_batch(self, *, keep: bool) -> None:
        if not self.has_changed():
            return
        if self.is_incompatible():
            self.was_resized = True
            self.note()  # each worker keeps its own
            return
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(
                f"buffer {self.name!r} changes during forward and is not a statistic that Paceline can combine: "
                "after each step it has the value of the step's last micro-batch",
                stacklevel=2,
            )
        self.is_changed = True
        if keep:
            self._last = self.current.clone()
        self.restore()

    def take(self, communicator: Communicator, owner: int) -> None:
        value = (self._noted if self._last is None else self._last).clone(memory_format=torch.contiguous_format)
        communicator.broadcast(value, owner).wait()
        self._noted = value
        self.restore()
