"""Trainer.setup in its plain form: the loop's rules, records, schedulers, clipping, settings, and misuse."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl

X, Y = vectors(50)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def setup(**settings: Any) -> pl.Trainer:
    settings = {"data": (X, Y), "global_batch": 8, "micro_batch": 4, **settings}
    return pl.Trainer.setup(settings.pop("model", mlp), settings.pop("optimizer", sgd), **grouped(**settings))


def loss_of(trainer: pl.Trainer, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(trainer.model(batch.x), batch.y)


def train(trainer: pl.Trainer, epochs: int = 1) -> list[pl.StepRecord]:
    records = []
    for epoch in trainer.epochs(epochs):
        for batch in epoch:
            trainer.backward(loss_of(trainer, batch))
            if record := trainer.step():
                records.append(record)
    return records


def test_records_tell_what_each_step_did() -> None:
    with setup(max_grad_norm=math.inf, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)) as trainer:
        records = train(trainer, 2)
        assert trainer.steps_per_epoch == 7
    assert [r.step for r in records] == list(range(1, 15))
    assert [r.epoch for r in records] == [0] * 7 + [1] * 7
    assert [r.weight for r in records] == ([8] * 6 + [2]) * 2  # the tail is a smaller step
    assert [r.lr for r in records] == pytest.approx([0.1 * 0.5**n for n in range(1, 15)])
    assert all(r.grad_norm > 0 and math.isfinite(r.loss) for r in records)
    assert len(records[0].timings) == 1


def test_loss_is_the_mean_over_the_global_batch_before_the_update() -> None:
    with setup(shuffle=False) as trainer:
        before = [functional.cross_entropy(trainer.model(X[:8]), Y[:8]).item()]
        records = train(trainer)
    assert records[0].loss == pytest.approx(before[0], rel=1e-6)


def test_a_model_that_exists_is_trained_in_place_and_nothing_is_wrapped() -> None:
    model = mlp()
    with setup(model=model) as trainer:
        assert trainer.model is model
        train(trainer)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_clipping_bounds_the_mean_gradient(pool: WorkerPool) -> None:
    def moves() -> list[float]:
        steps: list[float] = []
        with setup(max_grad_norm=1e-3, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)) as trainer:
            previous = [torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()]

            def measure(_: pl.StepRecord) -> None:
                now = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()
                steps.append((now - previous[0]).norm().item())
                previous[0] = now

            trainer.every(1, measure)
            train(trainer)
        return steps

    for steps in [moves(), *pool.run(moves, 2)]:
        assert len(steps) == 7
        assert steps == pytest.approx([1e-3] * 7, rel=1e-2)


def test_plateau_schedulers_get_the_loss() -> None:
    with setup(
        scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0)
    ) as trainer:
        assert train(trainer)[-1].lr < 0.1


def test_every_runs_on_all_workers_even_without_a_share(pool: WorkerPool) -> None:
    def hooked() -> tuple[list[int], int]:
        calls: list[int] = []
        yielded = 0
        with setup(global_batch=8, micro_batch=4, data=(X[:20], Y[:20]), shares=[1, 1, 1]) as trainer:
            trainer.every(2, lambda record: calls.append(record.step))
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    yielded += 1
                    trainer.backward(loss_of(trainer, batch))
                    trainer.step()
        return calls, yielded

    outcomes = pool.run(hooked, 3)
    assert [calls for calls, _ in outcomes] == [[2, 4, 6]] * 3
    # Two full steps of two micro-batches and a tail of one, twice: the third worker never has a share.
    assert [yielded for _, yielded in outcomes] == [6, 4, 0]


def test_an_abandoned_step_leaves_no_trace_in_the_result() -> None:
    def run(interrupted: bool) -> str:
        model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
        with setup(model=model) as trainer:
            if not interrupted:
                trainer.every(1, lambda record: trainer.end_epoch() if record.step == 3 else None)
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    trainer.backward(loss_of(trainer, batch))
                    if trainer.step() is None and trainer.position.step == 3:
                        break
            train(trainer, 2)
            return digest(trainer.model.state_dict())

    assert run(interrupted=True) == run(interrupted=False)


@pytest.mark.parametrize("backward", ["ours", "bare"])
def test_misuse_of_the_loop(backward: str) -> None:
    with setup() as trainer:
        with pytest.raises(pl.errors.MisuseError, match="step\\(\\) was called without a micro-batch"):
            trainer.step()
        with pytest.raises(pl.errors.MisuseError, match="backward\\(\\) was called outside of a micro-batch"):
            trainer.backward(torch.zeros((), requires_grad=True))
        epoch = next(iter(trainer.epochs(1)))
        batches = iter(epoch)
        batch = next(batches)
        with pytest.raises(pl.errors.MisuseError, match="step\\(\\) was called before backward\\(\\)"):
            trainer.step()
        with pytest.raises(TypeError, match="the loss is a NoneType: it must be a tensor with one number"):
            trainer.backward(None)
        with pytest.raises(ValueError, match=r"the loss has shape \(4,\): it must be one number"):
            trainer.backward(trainer.model(batch.x).sum(1))
        if backward == "ours":
            trainer.backward(loss_of(trainer, batch))
        else:
            loss_of(trainer, batch).backward()
        with pytest.raises(pl.errors.MisuseError, match="before step\\(\\) was called for this one"):
            next(batches)


def test_a_nan_loss_stops_before_the_weights_are_spoilt(pool: WorkerPool) -> None:
    def run() -> None:
        with setup(shuffle=False, shares="equal") as trainer:
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    loss = loss_of(trainer, batch)
                    poison = trainer.position.step == 2 and bool((batch.x == X[20]).all(1).any())
                    trainer.backward(loss * float("nan") if poison else loss)
                    trainer.step()

    with pytest.raises(pl.errors.NonFiniteError, match="loss is nan at step 3, micro-batch 1, rank 0") as caught:
        run()
    assert (caught.value.step, caught.value.micro_batch, caught.value.rank) == (3, 1, 0)
    with pytest.raises(WorkersFailed) as failed:
        pool.run(run, 2)
    assert {str(error).partition(":")[0] for error in failed.value.errors.values()} == {
        "loss is nan at step 3, micro-batch 1, rank 1"
    }


def test_an_infinite_gradient_under_a_finite_loss_is_found_when_clipping() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.w.abs().sqrt()).mean()

    with (
        pytest.raises(
            pl.errors.NonFiniteError, match=r"the gradient's norm is (nan|inf) at step 1 although every loss"
        ),
        pl.Trainer.setup(Steep, sgd, data=X, global_batch=8, max_grad_norm=1.0) as trainer,
    ):
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(trainer.model(batch))
                trainer.step()


def test_exact_mode_names_the_micro_batch_of_an_infinite_gradient(pool: WorkerPool) -> None:
    def run() -> None:
        with setup(shuffle=False, shares="equal", exact=True) as trainer:
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    is_poisoned = trainer.position.step == 2 and bool((batch.x == X[20]).all(1).any())
                    with poison(trainer.model[0].weight) if is_poisoned else nullcontext():
                        trainer.backward(loss_of(trainer, batch))
                    trainer.step()

    def poison(weight: torch.Tensor) -> Any:
        return weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))

    with pytest.raises(pl.errors.NonFiniteError, match="gradient is inf at step 3, micro-batch 1, rank 0"):
        run()
    with pytest.raises(WorkersFailed) as failed:
        pool.run(run, 2)
    assert all("gradient is inf at step 3, micro-batch 1, rank 1" in str(e) for e in failed.value.errors.values())


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"global_batch": 10}, ValueError, "is not a multiple of micro_batch=4: choose global_batch=8 or 12"),
        ({"micro_batch": 16}, ValueError, "micro_batch=16 does not fit global_batch=8: choose micro_batch <= 8"),
        ({"precision": "fp8"}, ValueError, "precision='fp8' is unknown: choose 'fp32', 'bf16' or 'fp16'"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm=-1.0 must be >= 0"),
        ({"timeout_s": 0}, ValueError, "timeout_s=0 must be > 0"),
        ({"threads": 0}, ValueError, "threads=0"),
        ({"seed": "7"}, ValueError, "seed='7' must be an int"),
        ({"shares": [1, 1]}, ValueError, r"shares=\[1.0, 1.0\] names 2 workers, the world has 1"),
        ({"shares": "fair"}, ValueError, "shares='fair' is unknown: choose 'measured', 'equal'"),
        ({"speed_hints": [1, 1]}, ValueError, r"speed_hints=\[1.0, 1.0\] names 2 workers, the world has 1"),
        ({"shares": "equal", "speed_hints": [1]}, ValueError, "speed_hints, .* would be ignored"),
        ({"shares": "equal", "replan_every": 50}, ValueError, "replan_every would be ignored"),
        ({"data": []}, ValueError, "data is empty"),
        ({"data": (X, Y[:10])}, ValueError, r"the columns of data have \[50, 10\] rows"),
        ({"data": iter([1])}, TypeError, "can be read only once"),
        ({"model": lambda: nn.ReLU()}, ValueError, "no parameter that requires a gradient"),
        ({"model": lambda: 3}, TypeError, "without a parameters\\(\\) method"),
        ({"optimizer": lambda _: 3}, TypeError, "optimizer made a int"),
        ({"learning_rate": 3}, TypeError, "learning_rate"),
    ],
)  # fmt: skip
def test_bad_settings_name_value_and_remedy(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        setup(**settings)


def test_process_settings_come_back() -> None:
    torch.set_num_threads(2)
    try:
        with setup(exact=True):
            assert torch.get_num_threads() == 1
            assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 2
        assert not torch.are_deterministic_algorithms_enabled()
        with setup(threads=1):
            assert torch.get_num_threads() == 1
        with pytest.raises(ValueError, match="no parameter"):
            setup(exact=True, model=lambda: nn.ReLU())
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(1)


def test_workers_that_build_different_models_are_told(pool: WorkerPool) -> None:
    def run() -> None:
        import os

        setup(model=lambda: nn.Linear(12, 4 + int(os.environ["RANK"])))

    with pytest.raises(WorkersFailed) as failed:
        pool.run(run, 2)
    assert all("ranks [1] built a model whose parameters" in str(e) for e in failed.value.errors.values())


def test_every_worker_starts_with_rank_0s_weights(pool: WorkerPool) -> None:
    def weights() -> str:
        import os

        model = mlp()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float(os.environ["RANK"]))
        with setup(model=model) as trainer:
            return digest(trainer.model.state_dict())

    assert len(set(pool.run(weights, 3))) == 1


def test_two_trainers_in_one_process_do_not_disturb_each_other(pool: WorkerPool) -> None:
    def one_after_another() -> list[str]:
        results = []
        for _ in range(2):
            with setup(exact=True) as trainer:
                train(trainer)
                results.append(digest(trainer.model.state_dict()))
        return results

    def side_by_side() -> list[str]:
        with setup(exact=True) as first, setup(exact=True) as second:
            epochs = zip(first.epochs(1), second.epochs(1), strict=True)
            for one, other in epochs:
                for mine, theirs in zip(one, other, strict=True):
                    for trainer, batch in ((first, mine), (second, theirs)):
                        trainer.backward(loss_of(trainer, batch))
                        trainer.step()
            return [digest(first.model.state_dict()), digest(second.model.state_dict())]

    assert len(set(one_after_another() + side_by_side())) == 1
    for results in pool.run(one_after_another, 2):
        assert results == one_after_another()
