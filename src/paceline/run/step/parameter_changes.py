"""Changes of the set of trained parameters: between two steps, parameters may be frozen, unfrozen or added.

A single worker uses the new set at once. Several workers first compare their sets in the exchange of the next step,
and then repeat the step with the new set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.comm.base import Communicator
from paceline.run.step.build import share_weights
from paceline.run.step.ema import WeightAverage
from paceline.run.step.hooks import Hooks
from paceline.run.step.replica import Replica
from paceline.sync.strategy import GradientExchange


@dataclass
class ParameterChanges:
    """added: the parameters that are new to the run, until the new set is used; None if the set has not changed."""

    replica: Replica
    communicator: Communicator
    exchange: GradientExchange
    average: WeightAverage | None
    hooks: Hooks
    added: list[torch.Tensor] | None = None

    def note(self) -> None:
        """The replica's parameters have changed."""
        added = [*(self.added or []), *self.replica.take_changes()]
        if self.exchange.averages is not None:
            self.exchange.averages.check_parameters(self.replica.parameters)
        elif self.communicator.world.size == 1:
            self.use(added)
        else:
            self.added = added

    def use(self, added: Sequence[torch.Tensor] = ()) -> None:
        """Train the replica's current parameters. All workers get rank 0's values of those in `added`."""
        self.added = None
        replica = self.replica
        if added:
            share_weights(replica.model, replica.parameters, self.communicator)
        self.exchange.set_parameters(replica.parameters)
        if self.average is not None:
            self.average.add(replica.parameters)
        for hook in self.hooks.of_parameters:
            hook()
