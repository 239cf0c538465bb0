"""The promise on a GPU: one rank, and two ranks sharing it over Gloo. CI has no GPU; run by hand where there is one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scenarios import SCENARIOS, Outcome, train
from worker_pool import WorkerPool

import paceline as pl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPLITS = [[1], [4, 4], [6, 2]]


def on_gpu(name: str, precision: str, exact: bool, split: Any) -> Outcome:
    return train(name, split, device="cuda", precision=precision, exact=exact)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_same_digest_on_one_and_two_ranks(name: str, precision: str, pool: WorkerPool) -> None:
    outcomes = {
        tuple(split): outcome
        for split in SPLITS
        for outcome in pool.run(on_gpu, len(split), name, precision, True, split)
    }
    for split, outcome in outcomes.items():
        print(f"\n{name} {precision} {split}: {outcome.digest}")
    assert len({outcome.digest for outcome in outcomes.values()}) == 1


def test_measured_shares_keep_the_promise(pool: WorkerPool) -> None:
    (alone,) = pool.run(on_gpu, 1, "transformer", "fp32", True, [1])
    assert {o.digest for o in pool.run(on_gpu, 2, "transformer", "fp32", True, "measured")} == {alone.digest}


def test_replicas_on_a_gpu_are_averaged(pool: WorkerPool) -> None:
    def averaged() -> Outcome:
        strategy = pl.Averaging(every=4, overlap=True, compress="bf16")
        return train("mlp", device="cuda", exact=False, strategy=strategy)

    first, second = pool.run(averaged, 2)
    assert all(torch.equal(first.parameters[name], second.parameters[name]) for name in first.parameters)
    known = [loss for loss in first.losses if not math.isnan(loss)]  # from the first meeting on
    assert known[-1] < known[0]


@pytest.mark.parametrize("name", SCENARIOS)
def test_plain_mode_agrees_to_rounding(name: str, pool: WorkerPool) -> None:
    (alone,) = pool.run(on_gpu, 1, name, "fp32", False, [1])
    for outcome in pool.run(on_gpu, 2, name, "fp32", False, [6, 2]):
        for key, expected in alone.parameters.items():
            difference = (outcome.parameters[key].double() - expected.double()).norm()
            assert difference / expected.double().norm().clamp(min=1e-12) <= 1e-4, key


def test_fp16_on_gpu_agrees_over_ranks(pool: WorkerPool) -> None:
    (alone,) = pool.run(on_gpu, 1, "mlp", "fp16", True, [1])
    assert {o.digest for o in pool.run(on_gpu, 2, "mlp", "fp16", True, [6, 2])} == {alone.digest}


def test_nan_on_a_gpu_is_found_without_waiting_for_it() -> None:
    with (
        pytest.raises(pl.errors.NonFiniteError, match="loss is nan at step 3, micro-batch 0, rank 0"),
        pl.Trainer.setup(
            lambda: torch.nn.Linear(4, 1),
            lambda p: torch.optim.SGD(p, lr=0.1),
            data=torch.randn(64, 4),
            global_batch=8,
            device="cuda",
        ) as trainer,
    ):
        for epoch in trainer.epochs(1):
            for batch in epoch:
                loss = trainer.model(batch).mean()
                trainer.backward(loss * float("nan") if trainer.position.step == 2 else loss)
                trainer.step()
