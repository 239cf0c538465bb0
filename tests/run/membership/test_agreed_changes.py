"""All workers enter the next generation after the same step, also those that joined as a world of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from paceline.checkpoint.policy import Decision
from paceline.core.world import World
from paceline.run.saving import checkpointer
from paceline.run.saving.checkpointer import Checkpointer, RunParts


@dataclass
class FakeCommunicator:
    world: World


class FakeNumbers:
    def __init__(self, request: Decision) -> None:
        self.requests = (0.0, float(request))


def step_of_change(worker: Checkpointer) -> int:
    """After which step the worker acts on a request that was sent with step 0."""
    for step in range(10):
        worker.observe(cast("Any", FakeNumbers(Decision.CONTINUE if step else Decision.CHANGE)))
        if worker.is_active:
            return step
    raise AssertionError("the request was never read")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_newcomer_acts_on_requests_at_the_same_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU requests are read some steps late. A world of one would not wait, and leave the others waiting."""
    monkeypatch.setattr(checkpointer, "gather", lambda own, _: [own])
    together = World(rank=0, size=2, device=torch.device(device))
    worlds = {"survivor": together, "newcomer": World(device=torch.device(device), is_joining=True)}
    steps = {}
    for name, world in worlds.items():
        communicator = FakeCommunicator(world)
        parts = RunParts(*[cast("Any", None)] * 2, cast("Any", communicator), *[cast("Any", None)] * 3)
        worker = Checkpointer(None, None, parts)
        communicator.world = replace(together, rank=1)
        worker.reconnect(cast("Any", None))
        steps[name] = step_of_change(worker)
    assert steps == {"survivor": 0 if device == "cpu" else 2, "newcomer": 0 if device == "cpu" else 2}
