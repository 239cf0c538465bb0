"""Changes of the set of trained parameters: between two steps, parameters may be frozen, unfrozen or added.

A single worker uses the new set at once. Several workers first compare their sets in the exchange of the next step,
and then repeat the step with the new set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.base import Communicator
from paceline.run.step.build import share_weights
from paceline.run.step.ema import WeightAverage
from paceline.run.step.hooks import Hooks
from paceline.run.step.replica import Replica
from paceline.sync.buffers import Buffers
from paceline.sync.strategy import GradientExchange


class ParameterChanges:
    """added: the parameters that are new to the run, until the new set is used; None if the set has not changed."""

    def __init__(
        self,
        replica: Replica,
        communicator: Communicator,
        exchange: GradientExchange,
        average: WeightAverage | None,
        hooks: Hooks,
    ) -> None:
        self.added: list[torch.Tensor] | None = None
        self._replica = replica
        self._communicator = communicator
        self._exchange = exchange
        self._average = average
        self._hooks = hooks

    def note(self) -> None:
        """The replica's parameters have changed."""
        added = [*(self.added or []), *self._replica.take_changes()]
        if self._exchange.averages is not None:
            self._exchange.averages.check_parameters(self._replica.parameters)
        elif self._communicator.world.size == 1:
            self.use(added)
        else:
            self.added = added

    def use(self, added: Sequence[torch.Tensor] = ()) -> None:
        """Train the replica's current parameters. All workers get rank 0's values of those in `added`."""
        self.added = None
        replica, communicator = self._replica, self._communicator
        if added:
            share_weights(replica.model, replica.parameters, communicator)
        self._exchange.set_parameters(replica.parameters, Buffers(replica.model, communicator))
        if self._average is not None:
            self._average.add(replica.parameters)
        for hook in self._hooks.of_parameters:
            hook()
