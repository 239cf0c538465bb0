"""Hooks: where a user's code runs inside a step or between epochs, on all workers alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch.nn import functional
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl

X, Y = vectors(40)


def setup(**settings: Any) -> pl.Trainer:
    settings = {"data": (X, Y), "global_batch": 8, "micro_batch": 4, "exact": True, **settings}
    return pl.Trainer.setup(mlp, lambda p: torch.optim.SGD(p, lr=0.1), **grouped(**settings))


def train(trainer: pl.Trainer, epochs: int = 2) -> None:
    for epoch in trainer.epochs(epochs):
        for batch in epoch:
            trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
            trainer.step()


def test_gradients_can_be_changed_before_clipping(pool: WorkerPool) -> None:
    def run(noise: float = 0.1) -> tuple[str, list[float]]:
        norms: list[float] = []

        def add_noise(parameters: Mapping[str, torch.Tensor]) -> None:
            for parameter in parameters.values():
                parameter.grad.add_(torch.randn_like(parameter), alpha=noise)

        with setup(max_grad_norm=100.0) as trainer:
            trainer.on_gradients(add_noise)
            trainer.every(1, lambda record: norms.append(record.grad_norm))
            train(trainer)
            return digest(trainer.model.state_dict()), norms

    alone, norms = run()
    assert run(noise=0.0)[0] != alone
    assert min(norms) > 0.1 * 0.9 * 1604**0.5  # of the noise, over all parameters: the norm is taken afterwards
    assert [state for state, _ in pool.run(run, 2)] == [alone, alone]  # one draw for all, however many there are


def test_a_gradient_hook_sees_the_mean_over_the_global_batch() -> None:
    seen: list[dict[str, torch.Tensor]] = []
    with setup(shuffle=False, exact=False, data=(X[:8], Y[:8])) as trainer:
        functional.cross_entropy(trainer.model(X[:8]), Y[:8]).backward()
        expected = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
        trainer.on_gradients(lambda parameters: seen.append({name: p.grad.clone() for name, p in parameters.items()}))
        train(trainer, 1)
    (gradients,) = seen
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name])


def test_epoch_hooks_run_once_per_epoch_on_all_workers(pool: WorkerPool) -> None:
    def run() -> tuple[list[Any], list[float]]:
        calls: list[Any] = []
        losses: list[float] = []
        with setup(shares=[1, 0]) as trainer:  # the second worker never has a share
            trainer.every_epoch(1, lambda number: calls.append((number, trainer.position.step)))
            trainer.every_epoch(2, lambda _: losses.append(trainer.evaluate((X, Y), eval_loss)))
            train(trainer, 4)
        return calls, losses

    (calls, losses), other = pool.run(run, 2)
    assert calls == [(0, 5), (1, 10), (2, 15), (3, 20)]
    assert losses[0] > losses[1]
    assert other == (calls, losses)


def eval_loss(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def test_the_epochs_end_is_seen_also_where_its_loop_is_left_after_the_last_step() -> None:
    ended: list[int] = []
    with setup() as trainer:
        trainer.every_epoch(1, ended.append)
        for epoch in trainer.epochs(2):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                if (record := trainer.step()) and record.step % 5 == 0:
                    break
        train(trainer, 3)
    assert ended == [0, 1, 2]


@pytest.mark.parametrize("where", ["on_gradients", "every", "every_epoch"])
def test_a_hook_that_raises_ends_all_workers_at_once(pool: WorkerPool, where: str) -> None:
    def run() -> None:
        with setup(timeout_s=60) as trainer:

            def hook(_: object) -> None:
                if trainer.world.rank == 1:
                    raise KeyError("in the hook of rank 1")

            getattr(trainer, where)(*[1] * (where != "on_gradients"), hook)
            train(trainer)

    with pytest.raises(WorkersFailed) as failed:
        pool.run(run, 2)
    assert "in the hook of rank 1" in str(failed.value)


def test_hooks_are_checked_when_given() -> None:
    with setup() as trainer:
        with pytest.raises(ValueError, match=r"every_epoch\(0, ...\): choose at least 1 epoch"):
            trainer.every_epoch(0, print)
        with pytest.raises(ValueError, match=r"every\(0, ...\): choose at least 1 step"):
            trainer.every(0, print)
