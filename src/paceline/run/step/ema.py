"""An exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from paceline.checkpoint.errors import CheckpointError
from paceline.core.errors import MisuseError
from paceline.run.saving.state import model_differences
from paceline.run.sharding.optimizers import PieceOptimizers
from paceline.run.sharding.states import AVERAGE, part_of
from paceline.run.step.build import named_parameters, plain_name
from paceline.run.step.replica import Replica

# Runs a collective operation, and repeats it if a worker is lost.
Together: TypeAlias = Callable[[Callable[[], Any]], Any]


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
        self.add(replica.parameters)
        self._weight_of_new = 1.0 - decay
        self._is_in_use = False
        self._own: list[torch.Tensor] = []  # the model's own weights while it has the averages

    def add(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Average these parameters too. New averages start with the current values."""
        new = {plain_name(name): p for name, p in parameters.items() if plain_name(name) not in self._names}
        self._names += new
        self._parameters += new.values()
        self._begin(new)

    def _begin(self, new: Mapping[str, torch.Tensor]) -> None:
        self._averages += [p.detach().to(_average_dtype(p), copy=True) for p in new.values()]

    @torch.no_grad()
    def update(self) -> None:
        """Called after every optimizer step."""
        if self._is_in_use:
            raise MisuseError("a step was taken inside ema_weights(), where the model has the averaged weights")
        weights, averages = self._own_parts()
        if averages:
            new = [own.to(average.dtype) for own, average in zip(weights, averages, strict=True)]
            torch._foreach_lerp_(averages, new, self._weight_of_new)

    def _own_parts(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The weights that this worker averages, and their averages."""
        return self._parameters, self._averages

    def whole(self) -> list[torch.Tensor]:
        """The averages of all parameters."""
        return self._averages

    @contextmanager
    def in_model(self, together: Together = lambda do: do()) -> Iterator[None]:
        """The model has the averaged weights inside the block."""
        if self._is_in_use:
            raise MisuseError(
                "ema_weights() was called inside ema_weights(): the model has the averaged weights already"
            )
        averages = together(self.whole)
        self._own = [parameter.detach().clone() for parameter in self._parameters]
        self._is_in_use = True
        try:
            _copy(averages, self._parameters)
            yield
        finally:
            _copy(self._own, self._parameters)
            self._is_in_use, self._own = False, []

    @contextmanager
    def not_in_model(self) -> Iterator[None]:
        """The model has its own weights inside the block, also inside `in_model`."""
        was_in_use, self._is_in_use = self._is_in_use, False
        shown = [parameter.detach().clone() for parameter in self._parameters if was_in_use]
        if was_in_use:
            _copy(self._own, self._parameters)
        try:
            yield
        finally:
            if was_in_use:
                _copy(shown, self._parameters)
            self._is_in_use = was_in_use

    def state_dict(self) -> dict[str, torch.Tensor]:
        self._check_can_be_saved()
        return dict(zip(self._names, self._averages, strict=True))

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        # The saved run may have trained other parameters too.
        if isinstance(state, Mapping):
            self.add({name: p for name, p in named_parameters(self._model).items() if plain_name(name) in state})
        if lines := model_differences(state, self.state_dict()):
            raise CheckpointError("the averaged weights are not of this model:\n  " + "\n  ".join(lines))
        self._take(state)

    def _take(self, state: Mapping[str, torch.Tensor]) -> None:
        _copy([state[name] for name in self._names], self._averages)

    def _check_can_be_saved(self) -> None:
        if self._is_in_use:
            raise MisuseError("the run cannot be saved inside ema_weights(), where the model has the averaged weights")


class PieceAverage(WeightAverage):
    """The average if the optimizer's state is divided among the workers: each worker has the averages of its pieces."""

    def __init__(self, replica: Replica, pieces: PieceOptimizers, decay: float) -> None:
        self._pieces = pieces
        super().__init__(replica, decay)

    def _begin(self, new: Mapping[str, torch.Tensor]) -> None:
        division = self._pieces.shards.division
        division.cover(new)  # a resumed run may have trained parameters that are frozen until its state is loaded
        for parameter in new.values():
            for piece in division.own_pieces(parameter):
                self._pieces.averages[piece.weights] = piece.weights.to(_average_dtype(parameter), copy=True)

    def _own_parts(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return list(self._pieces.averages), list(self._pieces.averages.values())

    def whole(self) -> list[torch.Tensor]:
        """Called by all workers together."""
        averages = self._pieces.whole_averages(lambda _: True)
        return [averages[id(parameter)] for parameter in self._parameters]

    def divided_state(self, keeps: Callable[[torch.Tensor], bool]) -> dict[str, torch.Tensor]:
        """Like `state_dict`, which a single worker cannot compute. Called by all workers together.

        keeps: whether this worker keeps the average of a parameter. Other averages are on the meta device.
        """
        self._check_can_be_saved()
        averages = self._pieces.whole_averages(keeps)
        return {name: averages[id(p)] for name, p in zip(self._names, self._parameters, strict=True)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Names and shapes only."""
        self._check_can_be_saved()
        pairs = zip(self._names, self._parameters, strict=True)
        return {name: torch.empty_like(p, dtype=_average_dtype(p), device="meta") for name, p in pairs}

    def _take(self, state: Mapping[str, torch.Tensor]) -> None:
        division = self._pieces.shards.division
        for name, parameter in zip(self._names, self._parameters, strict=True):
            for piece in division.own_pieces(parameter):
                part = part_of({AVERAGE: state[name]}, parameter, piece, division)
                self._pieces.averages[piece.weights].copy_(part[AVERAGE])


def average_of(replica: Replica, decay: float) -> WeightAverage:
    return WeightAverage(replica, decay) if replica.pieces is None else PieceAverage(replica, replica.pieces, decay)


@torch.no_grad()
def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _average_dtype(parameter: torch.Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
