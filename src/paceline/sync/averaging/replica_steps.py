"""Steps over several replicas per process, computed one after another by the user and then averaged.

The exchange treats a replica as a micro-batch: gradients, buffers and loss are handed over after its backward, under
its global number. So the mean, plain or exact, does not depend on the process that holds a replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.comm.base import Communicator
from paceline.core.errors import MisuseError
from paceline.plan.shares import Plan, ranges
from paceline.sync.replica_gradients import Reduce, ReplicaGradients
from paceline.sync.step_numbers import StepNumbers


@dataclass(frozen=True)
class Offer:
    """The result of one replica: the mean loss of `weight` samples, and the buffers that its forward changed.

    Gradients stay in `.grad`.
    """

    weight: int
    loss: torch.Tensor
    buffers: Mapping[str, torch.Tensor]


class BufferWatch:
    """Finds the changes that a forward pass makes to a model's buffers, and can undo them."""

    def __init__(self, model: Any) -> None:
        modules = model.named_modules() if isinstance(model, nn.Module) else ()
        self._places = [
            (f"{path}.{key}".lstrip("."), module, key)
            for path, module in modules
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        # Kernels that write running statistics do not increment the tensor's version.
        self._statistics = {name for name, module, _ in self._places if isinstance(module, _NormBase)}
        self._before: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def begin(self) -> None:
        """Call before a forward pass: remembers the current buffers."""
        for name, buffer in self._buffers().items():
            if not self._is_as_before(name, buffer):
                self._before[name] = (buffer, buffer._version, buffer.clone())

    def changed(self) -> dict[str, torch.Tensor]:
        """The buffers that were written or replaced since `begin`, and all running statistics."""
        return {name: buffer for name, buffer in self._buffers().items() if not self._is_as_before(name, buffer)}

    @torch.no_grad()
    def take(self) -> dict[str, torch.Tensor]:
        """Restore the changed buffers and return their new values.

        A buffer whose size changed, such as a growing cache, is left alone.
        """
        taken = {}
        for name, buffer in self._buffers().items():
            value = self._before[name][2]
            if not self._is_as_before(name, buffer) and buffer.shape == value.shape and buffer.dtype == value.dtype:
                taken[name] = buffer.clone()
                buffer.copy_(value)
                self._before[name] = (buffer, buffer._version, value)
        return taken

    @torch.no_grad()
    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        buffers = self._buffers()
        for name, value in values.items():
            buffers[name].copy_(value)

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer for name, module, key in self._places if (buffer := module._buffers[key]) is not None}

    def _is_as_before(self, name: str, buffer: torch.Tensor) -> bool:
        known, version, _ = self._before.get(name, (None, 0, None))
        return buffer is known and buffer._version == version and name not in self._statistics


class ReplicaSteps:
    """Exchanges the gradients and buffers of this process's replicas with those of all processes.

    replicas: the trainable parameters of each replica. watches: one per replica. model: the first replica, whose device
    holds the sums. num_replicas: per process, by rank.
    """

    def __init__(
        self,
        model: Any,
        replicas: Sequence[Mapping[str, torch.Tensor]],
        watches: Sequence[BufferWatch],
        communicator: Communicator,
        num_replicas: Sequence[int],
        *,
        exact: bool,
    ) -> None:
        self._watches = watches
        self._gradients = ReplicaGradients(replicas, communicator, ranges(num_replicas), exact=exact, model=model)

    def exchange(self, offers: Sequence[Offer | None], reduce: Reduce | None) -> tuple[Plan, StepNumbers]:
        """Set the gradient of every replica to the mean, or to the result of `reduce`, and combine their buffers.

        A replica without an offer has no batch in this step. Returns the plan, by process, and the step's numbers.
        """
        weights = self._gradients.gather([0 if offer is None else offer.weight for offer in offers])
        if not any(weights):
            raise MisuseError("no replica has a gradient to share: call train_step for at least one of them first")
        first, *others = self._watches

        def end(index: int) -> torch.Tensor:
            offer = offers[index]
            assert offer is not None
            first.put(offer.buffers)
            return offer.loss

        result = self._gradients.average(weights, end, reduce)
        combined = first.changed()
        for other in others:
            other.put(combined)
        return result

    def close(self) -> None:
        self._gradients.close()
