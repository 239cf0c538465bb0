"""Divided state on a GPU that two ranks share over Gloo. CI has no GPU; run by hand where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest
from scenarios import SCENARIOS
from worker_pool import WorkerPool

import paceline as pl
from paceline.core.events import Event

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train(name: str, capture: str, **settings: Any) -> tuple[str, set[str]]:
    """A digest of the weights after two epochs, and what was captured."""
    scenario, captured = SCENARIOS[name], set()

    def note(event: Event) -> None:
        if event.name == "capture" and "number" in event.details:
            captured.add(event.details["what"])

    with pl.Trainer.setup(
        scenario.build,
        scenario.optimizer,
        data=scenario.data,
        scheduler=scenario.scheduler,
        max_grad_norm=scenario.max_grad_norm,
        device="cuda",
        global_batch=32,
        micro_batch=4,
        exact=True,
        **grouped(capture=capture, **settings),
    ) as trainer:
        trainer.listen(note)
        step = trainer.step_with(lambda batch: scenario.loss(trainer.model, batch))
        for epoch in trainer.epochs(2):
            for batch in epoch:
                step(batch)
        return digest(trainer.model.state_dict()), captured


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("name", ["transformer", "mlp"])
def test_same_bits_divided_and_whole_with_and_without_graphs(name: str, shard: str, pool: WorkerPool) -> None:
    [(reference, _)] = pool.run(train, 1, name, "off")
    for capture, expected in (("off", set()), ("on", {"micro-batch"})):

        def divided(capture: str = capture) -> tuple[str, set[str]]:
            return train(name, capture, shard=shard, shard_by=(3, 1), shares="equal")

        assert pool.run(divided, 2) == [(reference, expected)] * 2, capture


def test_resnet_has_the_same_bits(pool: WorkerPool) -> None:
    [(reference, _)] = pool.run(train, 1, "resnet", "off")
    for found, _ in pool.run(lambda: train("resnet", "off", shard="optimizer"), 2):
        assert found == reference
