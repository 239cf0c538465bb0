"""Replicas that have become different are found, and the first parameter that differs is named."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from grouping import grouped
from torch import nn
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.run.step import checks as replica_check
from paceline.run.step.checks import digests

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


def train(steps: int, every: int = 2, **settings: Any) -> int:
    """In step 1 the worker with a share changes a weight. Returns how many steps were completed."""
    with pytest.MonkeyPatch.context() as patch:  # workers serve other tests too
        patch.setattr(replica_check, "REPLICA_CHECK_STEPS", every)
        patch.setattr(replica_check, "MAX_COST", 1e9)
        return train_patched(steps, **settings)


def train_patched(steps: int, **settings: Any) -> int:
    settings = {"data": X, "global_batch": 4, "shares": [1.0, 0.0, 0.0][: pl.World.from_environment().size], **settings}
    with pl.Trainer.setup(
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)),
        lambda p: torch.optim.SGD(p, lr=0.1),
        **grouped(**settings),
    ) as trainer:
        for epoch in trainer.epochs(max_steps=steps):
            for batch in epoch:
                trainer.backward(trainer.model(batch).square().mean())
                if trainer.step():
                    with torch.no_grad():
                        trainer.model[1].weight[0, 2] += 1e-6
        return trainer.position.step


@pytest.mark.parametrize("size", [2, 3])
def test_a_weight_that_one_worker_changes_is_found(size: int, pool: WorkerPool) -> None:
    message = rf"after step 2 the weights of '1\.weight' on rank 1 differ from rank 0's: {size - 1} of {4 * size} "
    with pytest.raises(WorkersFailed, match=message + ".*trainer.every"):
        pool.run(train, size, 8)


def test_not_before_it_is_time(pool: WorkerPool) -> None:
    assert pool.run(train, 2, 3, 4) == [3, 3]


def test_equal_replicas_pass_and_a_worker_alone_has_nothing_to_compare(pool: WorkerPool) -> None:
    assert train(4) == 4
    assert pool.run(partial(train, 6, shares=[1.0, 1.0], global_batch=8, micro_batch=4), 2) == [6, 6]


def test_a_digest_depends_on_every_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        weights = torch.randn(40, 3, dtype=dtype)
        before = digests({"w": weights})
        assert torch.equal(before, digests({"w": weights.clone()}))
        bits = weights.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weights.element_size()])
        bits[17, 1] ^= 1
        assert not torch.equal(before, digests({"w": weights}))
