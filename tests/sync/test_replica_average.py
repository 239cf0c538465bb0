"""One average of one worker, without the others."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.base import DONE, Pending, Settled
from paceline.comm.single import SingleCommunicator
from paceline.core.errors import CommunicationError
from paceline.core.world import World
from paceline.sync.averaging.rounds import ReplicaAverage, WorkerRound


class BrokenSums(SingleCommunicator):
    """Sums fail while `is_broken`."""

    is_broken = True

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return Settled(CommunicationError("a worker was lost")) if self.is_broken else DONE


def test_an_average_whose_statistics_fail_has_changed_nothing() -> None:
    """They arrive after the weights, which must wait for them: the residual as well."""
    weights, statistics = torch.randn(1000), torch.ones(3)
    communicator = BrokenSums(World(), 10.0)
    average = ReplicaAverage([weights], [statistics], communicator, seed=0, compress="sparse")

    def take_step_and_average() -> None:
        weights.add_(torch.linspace(0, 1, 1000))
        average.add_step(1.0, 1)
        average.start(WorkerRound(weight=1.0, num_steps=1.0))
        average.finish(has_moved_on=False)

    with pytest.raises(CommunicationError, match="a worker was lost"):
        take_step_and_average()
    average.drop()
    residual = average.residuals()
    assert residual is not None
    assert not residual.any()
    assert average.num_unsent_steps == 1

    before, communicator.is_broken = weights.clone(), False
    take_step_and_average()
    residual = average.residuals()
    assert residual is not None
    assert residual.any()
    # Both steps are in what was sent and in what is left.
    torch.testing.assert_close(weights + residual, before + torch.linspace(0, 1, 1000))
    assert average.num_unsent_steps == 0
