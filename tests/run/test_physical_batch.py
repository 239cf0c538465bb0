"""Several micro-batches as one larger batch, for devices that need it: fewer passes, the same mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grouping import grouped
from models import SmallResNet, images, mlp, vectors
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

X, Y = vectors(42)


def train(**settings: Any) -> tuple[dict[str, torch.Tensor], list[int], list[float]]:
    sizes: list[int] = []
    losses: list[float] = []
    settings = {"global_batch": 16, "micro_batch": 2, "shares": "equal", **settings}
    with pl.Trainer.setup(mlp, lambda p: torch.optim.SGD(p, lr=0.1), data=(X, Y), **grouped(**settings)) as trainer:
        trainer.every(1, lambda record: losses.append(record.loss))
        for epoch in trainer.epochs(2):
            for batch in epoch:
                sizes.append(len(batch.x))
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        return {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}, sizes, losses


def test_fewer_passes_and_the_same_mean() -> None:
    expected, _, expected_losses = train()
    weights, sizes, losses = train(physical_batch=6)
    # Steps of 16, 16 and 10 samples.
    assert sizes == [6, 6, 4, 6, 6, 4, 6, 4] * 2
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def test_weights_are_counted_over_the_whole_batch() -> None:
    def weigh(batch: Any) -> int:
        return int((batch.y > 0).sum())

    def masked(**settings: Any) -> list[float]:
        losses: list[float] = []
        with pl.Trainer.setup(
            mlp, lambda p: torch.optim.SGD(p, lr=0.1), data=(X, Y), global_batch=14, micro_batch=2, weight_fn=weigh,
            **grouped(**settings),
        ) as trainer:  # fmt: skip
            trainer.every(1, lambda record: losses.append(record.loss))
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    each = functional.cross_entropy(trainer.model(batch.x), batch.y, reduction="none")
                    valid = batch.y > 0
                    trainer.backward((each * valid).sum() / valid.sum().clamp(min=1))
                    trainer.step()
        return losses

    assert masked(physical_batch=8) == pytest.approx(masked(), rel=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_each_worker_has_its_own(size: int, pool: WorkerPool) -> None:
    expected, _, _ = train()
    outcomes = pool.run(lambda: train(physical_batch=(8, 2, 4)[:size]), size)
    assert max(outcomes[0][1]) > 2
    assert max(outcomes[1][1]) == 2
    for weights, _, _ in outcomes:
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"physical_batch": 5}, "physical_batch=5 is not a multiple of micro_batch=2: .* such as 4"),
        ({"physical_batch": 0}, "physical_batch=0 must be >= 1"),
        ({"physical_batch": 4, "exact": True}, "physical_batch cannot be combined with exact=True"),
        ({"physical_batch": [4, 4]}, "physical_batch=.4, 4. names 2 workers, the world has 1"),
    ],
)
def test_what_cannot_be(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        train(**settings)


def test_batch_norm_would_see_another_batch() -> None:
    with pytest.raises(ValueError, match=r"physical_batch would change the statistics of the BatchNorm layer '.*'"):
        pl.Trainer.setup(
            SmallResNet, lambda p: torch.optim.SGD(p, lr=0.1), data=images(8), global_batch=4, micro_batch=2,
            batching=pl.Batching(physical_batch=4),
        )  # fmt: skip
