"""An exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from paceline.checkpoint.errors import CheckpointError
from paceline.core.errors import MisuseError
from paceline.run.saving.state import model_differences
from paceline.run.step.build import named_parameters, plain_name
from paceline.run.step.replica import Replica


class WeightAverage:
    """average = decay * average + (1 - decay) * weights after every step, starting with the initial weights.

    Covers parameters that are or were trained; buffers, such as BatchNorm's statistics, are not averaged. Averages are
    float32 if parameters have a coarser dtype, which would round the change of a step away.
    """

    def __init__(self, replica: Replica, decay: float) -> None:
        self._model = replica.model
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._averages: list[torch.Tensor] = []
        self.set_parameters(replica)
        self._weight_of_new = 1.0 - decay
        self._is_in_use = False
        self._own: list[torch.Tensor] = []  # the model's own weights while it has the averages

    def set_parameters(self, replica: Replica) -> None:
        """The set of trained parameters changed."""
        self._add(replica.parameters)

    def _add(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """New averages start with the current values."""
        for name, parameter in parameters.items():
            if plain_name(name) not in self._names:
                self._names.append(plain_name(name))
                self._parameters.append(parameter)
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                self._averages.append(parameter.detach().to(dtype, copy=True))

    @torch.no_grad()
    def update(self) -> None:
        """Called after every optimizer step."""
        if self._is_in_use:
            raise MisuseError("a step was taken inside ema_weights(), where the model has the averaged weights")
        new = [p.to(average.dtype) for p, average in zip(self._parameters, self._averages, strict=True)]
        torch._foreach_lerp_(self._averages, new, self._weight_of_new)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model has the averaged weights inside the block."""
        if self._is_in_use:
            raise MisuseError(
                "ema_weights() was called inside ema_weights(): the model has the averaged weights already"
            )
        self._own = [parameter.detach().clone() for parameter in self._parameters]
        self._is_in_use = True
        try:
            _copy(self._averages, self._parameters)
            yield
        finally:
            _copy(self._own, self._parameters)
            self._is_in_use, self._own = False, []

    @contextmanager
    def not_in_model(self) -> Iterator[None]:
        """The model has its own weights inside the block, also inside `in_model`."""
        was_in_use, self._is_in_use = self._is_in_use, False
        if was_in_use:
            _copy(self._own, self._parameters)
        try:
            yield
        finally:
            if was_in_use:
                _copy(self._averages, self._parameters)
            self._is_in_use = was_in_use

    def state_dict(self) -> dict[str, torch.Tensor]:
        if self._is_in_use:
            raise MisuseError(
                "the run cannot be saved inside ema_weights(), where the model's own weights are not in it"
            )
        return dict(zip(self._names, self._averages, strict=True))

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        # The saved run may have trained other parameters too.
        if isinstance(state, Mapping):
            self._add({name: p for name, p in named_parameters(self._model).items() if plain_name(name) in state})
        if lines := model_differences(state, self.state_dict()):
            raise CheckpointError("the averaged weights are not of this model:\n  " + "\n  ".join(lines))
        _copy([state[name] for name in self._names], self._averages)


@torch.no_grad()
def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
