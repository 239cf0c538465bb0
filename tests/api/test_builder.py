"""Trainer.builder: what it refuses, what its settings become, and that its runs are those of Trainer.setup."""

from __future__ import annotations

import math
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from waiting import wait_until
from worker_pool import WorkerPool

import paceline as pl
from paceline.api import builder as builder_module
from paceline.run.launching.background import Channel

X, Y = vectors(50)
EPOCHS = 3


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def empty() -> pl.compat.flodl.Builder:
    return pl.Trainer.builder(mlp, sgd, loss_of)


def ready(model: Any = mlp, optimizer: Any = sgd, train_fn: Any = loss_of) -> pl.compat.flodl.Builder:
    return pl.Trainer.builder(model, optimizer, train_fn).dataset((X, Y)).batch_size(16).num_epochs(EPOCHS)


@pytest.fixture
def task_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a builder would have run."""

    class Kept:
        def __init__(self, work: Any, num_workers: int) -> None:
            self.task, self.num_workers = work.args[0], num_workers

        def end(self, grace_s: float) -> None:
            return

    monkeypatch.setattr(builder_module, "Background", Kept)
    return lambda builder: builder.run()._background.task


@pytest.mark.parametrize("missing", ["dataset", "batch_size", "num_epochs"])
def test_what_is_missing_is_named(missing: str) -> None:
    values = {"dataset": (X, Y), "batch_size": 16, "num_epochs": 1}
    builder = empty()
    for name in values.keys() - {missing}:
        getattr(builder, name)(values[name])
    with pytest.raises(ValueError, match=rf"^{missing} is missing: give it with \.{missing}\(\.\.\.\)"):
        builder.run()


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("batch_size", (0,), "batch_size=0 must be >= 1"),
        ("batch_size", (8.0,), "batch_size=8.0 must be an int"),
        ("speed_hint", (-1, 2.0), "slow_rank=-1 must be >= 0"),
        ("num_epochs", (True,), "num_epochs=True must be an int"),
        ("checkpoint_every", (0,), "checkpoint_every=0 must be >= 1"),
        ("seed", (1.5,), "seed=1.5 must be an int"),
        ("policy", ("fast",), "policy='fast' is unknown: choose 'sync', 'cadence' or 'async'"),
        ("backend", ("nccl",), "backend='nccl' is unknown: choose 'device' or 'cpu'"),
        ("max_grad_norm", (-1,), "max_grad_norm=-1 must be >= 0"),
        ("lr_scale_ratio", (2,), "lr_scale_ratio=2 must be >= 0 and <= 1"),
        ("overhead_target", (0,), "overhead_target=0 is not a part of compute time"),
        ("anchor", (0,), "anchor=0 is not a positive integer"),
        ("max_anchor", (1.5,), "max_anchor=1.5 is not a positive integer"),
        ("max_batch_diff", (0,), "max_batch_diff=0 is not a positive integer"),
        ("divergence_threshold", (-1.0,), "threshold"),
        ("speed_hint", (0, -2.0), "ratio=-2.0 is not a ratio of speeds"),
        ("speed_hint", (0.5, 2.0), "slow_rank=0.5 must be an int"),
        ("devices", (0,), "devices=0 must be >= 1"),
        ("devices", ("cpu",), "devices='cpu': give a list of devices"),
        ("devices", (["cuda:7"],), "device='cuda:7' is not available"),
    ],
)
def test_a_bad_value_is_refused_where_it_is_given(method: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(empty(), method)(*arguments)


@pytest.mark.parametrize("method", ["scheduler", "epoch_fn", "metrics_fn", "checkpoint_fn"])
def test_callbacks_must_be_callable(method: str) -> None:
    with pytest.raises(TypeError, match=f"{method} is a int: pass a function"):
        getattr(empty(), method)(3)


def test_a_model_that_exists_is_no_factory() -> None:
    with pytest.raises(TypeError, match="model_factory is a Sequential: pass a function"):
        pl.Trainer.builder(mlp(), sgd, loss_of)


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda b: b.overhead_target(0.2), r"overhead_target would be ignored: nothing is averaged with policy\('sync"),
        (lambda b: b.policy("sync").no_divergence_guard(), "no_divergence_guard would be ignored"),
        (lambda b: b.policy("async").no_divergence_guard().divergence_threshold(0.1), "contradict each other"),
        (lambda b: b.checkpoint_every(2), r"checkpoint_every would be ignored without checkpoint_fn: .*every_epochs=2"),
        (lambda b: b.settings(exact=True).lr_scale_ratio(0.5), r"lr_scale_ratio\(0.5\) contradicts exact=True"),
        (lambda b: b.settings(exact=True).policy("cadence"), "exact=True needs strategy='gradients'"),
        (lambda b: b.settings(micro_batch=5), "global_batch=16.*micro_batch=5"),
        (
            lambda b: b.settings(batching=pl.Batching(batches_per_step=2)),
            r"batch_size\(16\) contradicts batches_per_step=2",
        ),
        (lambda b: b.settings(precision="fp8"), "precision='fp8' is unknown"),
        (
            lambda b: b.settings(balancing=pl.Balancing(shares=[1, 1, 1]), num_workers=2),
            "names 3 workers, the world has 2",
        ),
        (lambda b: b.speed_hint(3, 2.0).devices(2), "slow_rank=3 is not in a world of 2"),
        (lambda b: b.settings(seed=3), r"settings\(seed=...\): use the builder's \.seed"),
        (lambda b: b.settings(global_batch=3), r"use the builder's \.batch_size"),
        (lambda b: b.settings(model=mlp), r"settings\(model=...\): use Trainer\.builder\(\.\.\.\)"),
        (
            lambda b: b.settings(micro_bach=3),
            r"settings\(micro_bach=...\): unknown setting 'micro_bach': did you mean micro_batch\?",
        ),
        (lambda b: b.settings(num_epoch=3), "did you mean num_epochs"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(configure: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(ready()).run()


def test_a_timeline_is_recorded_where_it_is_wanted(tmp_path: Path) -> None:
    assert ready().timeline(tmp_path / "timeline").run().join().position.epoch == EPOCHS
    assert pl.reports.Timeline.load(tmp_path / "timeline").summary()


def test_settings_reach_the_run_under_the_names_of_setup(task_of: Any) -> None:
    scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)  # noqa: E731
    task = task_of(
        ready().devices(2).seed(7).max_grad_norm(1).scheduler(scheduler).speed_hint(1, 3.0).settings(shuffle=False)
    )
    assert task.settings == {
        "global_batch": 16,
        "micro_batch": 2,
        "seed": 7,
        "max_grad_norm": 1.0,
        "scheduler": scheduler,
        "balancing": pl.Balancing(speed_hints=(3.0, 1.0)),
        "runtime": pl.Runtime(),
        "shuffle": False,
    }
    assert task.lr_factor == 1
    assert task.devices == (torch.device("cpu"),) * 2


def test_a_division_of_the_state_may_be_given_apart_from_its_group(task_of: Any) -> None:
    task = task_of(ready().settings(shard="optimizer", optimization=pl.Optimization(shard_by="memory")))
    assert task.settings["optimization"] == pl.Optimization(shard="optimizer", shard_by="memory")
    assert "shard" not in task.settings


def test_policies_that_average_are_averaging_by_cadence(task_of: Any) -> None:
    builder = ready().policy("cadence").devices(["cpu", "cpu", "cpu"]).backend("cpu")
    builder.overhead_target(0.2).anchor(4).max_anchor(50).max_batch_diff(3).divergence_threshold(0.3)
    cadence = pl.Cadence(anchor=4, overhead_target=0.2, max_anchor=50, max_batch_diff=3)
    task = task_of(builder.lr_scale_ratio(0.5))
    assert task.settings["strategy"] == pl.Averaging(every=cadence, divergence_threshold=0.3)
    assert task.settings["global_batch"] == 48, "each of three workers takes its own batch"
    assert task.settings["micro_batch"] == 2, "as with any number of workers"
    assert task.lr_factor == 2
    overlapping = task_of(ready().policy("async").no_divergence_guard()).settings["strategy"]
    assert overlapping == pl.Averaging(every=pl.Cadence(), overlap=True, divergence_threshold=None)


@pytest.mark.parametrize(("batch_size", "micro_batch"), [(64, 8), (50, 10), (7, 1), (12, 2), (13, 13), (1, 1)])
def test_a_batch_is_divided_the_same_whatever_the_workers(task_of: Any, batch_size: int, micro_batch: int) -> None:
    for num_workers in (1, 3):
        assert task_of(ready().batch_size(batch_size).devices(num_workers)).settings["micro_batch"] == micro_batch


def test_a_loader_says_itself_how_large_its_batches_are() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    state = ready().dataset(loader).num_epochs(1).run().join()
    assert state.position.step == math.ceil(50 / 16)
    state = (
        empty()
        .dataset(pl.Batches(list(loader)))
        .num_epochs(1)
        .settings(batching=pl.Batching(batches_per_step=2))
        .run()
        .join()
    )
    assert state.position.step == math.ceil(math.ceil(50 / 4) / 2)


def with_setup(**settings: Any) -> tuple[str, str]:
    with pl.Trainer.setup(mlp, sgd, data=(X, Y), global_batch=16, micro_batch=2, **grouped(**settings)) as trainer:
        for epoch in trainer.epochs(EPOCHS):
            for batch in epoch:
                trainer.backward(loss_of(trainer.model, batch))
                trainer.step()
        return digest(trainer.model.state_dict()), digest(trainer.optimizer.state_dict())


def with_builder(**settings: Any) -> tuple[list[float], str, str]:
    handle = ready().seed(5).settings(**grouped(**settings)).run()
    metrics = list(handle)
    state = handle.join()
    assert handle.world_size == len(metrics[0].shares)
    return [m.loss for m in metrics], digest(state.model), digest(state.optimizer)


def test_an_exact_run_is_that_of_setup_on_any_number_of_workers(pool: WorkerPool) -> None:
    losses, *digests = with_builder(exact=True)
    assert tuple(digests) == with_setup(exact=True, seed=5)
    assert losses == sorted(losses, reverse=True)
    for outcome in pool.run(with_builder_in_exact_mode, 2):
        assert outcome == (losses, *digests)


def with_builder_in_exact_mode() -> tuple[list[float], str, str]:
    return with_builder(exact=True)


def test_the_state_is_named_parameters_buffers_and_the_optimizers() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    state = ready(build).run().join()
    assert list(state.parameters) == [name for name, _ in build().named_parameters()]
    assert list(state.buffers) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert int(state.buffers["1.num_batches_tracked"]) == EPOCHS * 25
    assert len(state.optimizer["state"]) == len(state.parameters)
    assert state.position == pl.reports.Position(epoch=EPOCHS, step=EPOCHS * 4)
    model = build()
    model.load_state_dict(state.model)
    assert digest(dict(model.named_parameters())) == digest(state.parameters)


def losses_without_learning(policy: Any) -> list[pl.reports.EpochMetrics]:
    def train_fn(model: Any, batch: Any) -> Any:
        return loss_of(model, batch), {"mean": batch.x.mean(), "rows": len(batch.x)}

    return list(ready(mlp, still, train_fn).num_epochs(2).policy(policy).settings(micro_batch=4).run())


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_metrics_are_means_over_every_sample_of_the_epoch(pool: WorkerPool, policy: str) -> None:
    alone = losses_without_learning(policy)
    first, second = pool.run(losses_without_learning, 2, policy)
    # 12 micro-batches of 4 and one of 2.
    rows = (48 * 4 + 2 * 2) / 50
    model = mlp()
    model.load_state_dict(ready(mlp, still).run().join().model)
    expected = functional.cross_entropy(model(X), Y).item()
    for metrics in (alone, first, second):
        assert [m.epoch for m in metrics] == [0, 1]
        for m in metrics:
            assert m.loss == pytest.approx(expected, rel=1e-6)
            assert m.scalars == pytest.approx({"mean": X.mean().item(), "rows": rows}, rel=1e-6)
            assert sum(m.shares) == pytest.approx(1)
            assert len(m.shares) == len(m.samples_per_s)
            assert m.wall_s > 0
    # The second epoch knows the speeds, whatever the strategy.
    assert all(speed > 0 for m in (alone, first) for speed in m[1].samples_per_s)
    # The clock is each worker's own.
    assert [m.loss for m in first] == [m.loss for m in second]
    assert [m.shares for m in first] == [m.shares for m in second]


def test_a_step_that_exact_mode_repeats_is_counted_once() -> None:
    calls: list[int] = []

    def train_fn(model: Any, batch: Any) -> Any:
        calls.append(len(batch.x))
        is_calm = len(calls) <= 16  # the third step's gradients do not fit the grid
        return loss_of(model, batch) * (1.0 if is_calm else 1e9), {"calm": is_calm}

    (metrics,) = ready(mlp, still, train_fn).num_epochs(1).settings(exact=True, micro_batch=2).run()
    assert len(calls) > 25, "no step was repeated"
    assert metrics.scalars == {"calm": 32 / 50}


def states_after(policy: Any) -> tuple[str, float]:
    builder = ready().policy(policy).anchor(2).lr_scale_ratio(0.5)
    handle = builder.run()
    metrics = list(handle)
    return digest(handle.join().model), metrics[-1].lr


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_averaged_replicas_end_equal_and_their_rate_grows_with_the_workers(pool: WorkerPool, policy: str) -> None:
    first, second = pool.run(states_after, 2, policy)
    assert first == second
    assert first[1] == pytest.approx(0.15)
    alone, lr = states_after(policy)
    assert lr == 0.1
    assert alone != first[0], "two workers took other steps than one"


def test_a_callback_that_returns_true_ends_the_run_after_its_epoch() -> None:
    seen: list[Any] = []
    state = ready().num_epochs(100).epoch_fn(lambda epoch, _: epoch == 1).run().join()
    assert state.position.epoch == 2
    state = ready().num_epochs(100).metrics_fn(lambda m: seen.append(m) or m.epoch == 2).run().join()
    assert state.position.epoch == 3
    assert [m.epoch for m in seen] == [0, 1, 2]
    assert ready().epoch_fn(lambda *_: "not a bool").run().join().position.epoch == EPOCHS


def ended_by_one_worker() -> tuple[pl.reports.Position, list[int]]:
    rank = pl.World.from_environment().rank
    saved: list[int] = []
    builder = ready().num_epochs(100).epoch_fn(lambda epoch, _: rank == 1 and epoch == 2)
    builder.checkpoint_fn(lambda epoch, _: saved.append(epoch)).checkpoint_every(2)
    return builder.run().join().position, saved


def test_one_workers_callback_ends_all_and_rank_0_alone_saves(pool: WorkerPool) -> None:
    end = pl.reports.Position(epoch=3, step=12)
    assert pool.run(ended_by_one_worker, 2) == [(end, [1]), (end, [])]


def test_callbacks_get_the_model_of_that_epoch_and_may_leave_it_in_evaluation_mode() -> None:
    modes: list[bool] = []
    models: dict[str, list[str]] = {"epoch_fn": [], "checkpoint_fn": []}

    def train_fn(model: Any, batch: Any) -> torch.Tensor:
        modes.append(model.training)
        return loss_of(model, batch)

    def save(_: int, model: nn.Module) -> None:
        models["checkpoint_fn"].append(digest(model.eval().state_dict()))

    def look(_: int, model: nn.Module) -> None:
        models["epoch_fn"].append(digest(model.state_dict()))

    state = ready(mlp, sgd, train_fn).checkpoint_fn(save).epoch_fn(look).run().join()
    assert all(modes)
    assert len(set(models["epoch_fn"])) == EPOCHS
    assert models["epoch_fn"] == models["checkpoint_fn"]
    assert models["epoch_fn"][-1] == digest(state.model)


@pytest.mark.parametrize("callback", ["epoch_fn", "metrics_fn", "checkpoint_fn"])
def test_a_callback_that_raises_ends_the_run_and_join_raises_it(callback: str) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError(callback)

    handle = getattr(ready(), callback)(fail).run()
    with pytest.raises(ZeroDivisionError, match=callback):
        handle.join()
    assert [m.epoch for m in handle.poll_metrics()] == [0]


@pytest.mark.parametrize("returned", [3.0, (torch.zeros(1), 2.0), ("loss", {})])
def test_what_train_fn_must_return_is_said(returned: Any) -> None:
    with pytest.raises(TypeError, match=r"train_fn returned a .*: return the micro-batch's loss, a tensor"):
        ready(train_fn=lambda *_: returned).run().join()


def test_a_scalar_must_be_one_number() -> None:
    with pytest.raises(ValueError, match=r"train_fn returned shape \(4,\) as 'logits': it must be one number"):
        ready(train_fn=lambda model, batch: (loss_of(model, batch), {"logits": model(batch.x)[0]})).run().join()


def test_a_run_with_checkpoints_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = with_builder(exact=True)
    is_started = Event()
    calls: list[int] = []
    channels: list[Channel] = []
    train = builder_module.train
    monkeypatch.setattr(
        builder_module, "train", lambda task, channel: (channels.append(channel), train(task, channel))[1]
    )

    def train_fn(model: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3 * 8:
            is_started.wait()
            handle.stop()
            wait_until(channels[-1].is_stop_requested)  # the request is relayed by a thread
        return loss_of(model, batch)

    checkpoints = pl.Checkpoints(tmp_path / "run", every_steps=100)
    handle = ready(train_fn=train_fn).seed(5).settings(exact=True, checkpoints=checkpoints).run()
    is_started.set()
    assert 3 <= handle.join().position.step < EPOCHS * 4
    assert with_builder(exact=True, checkpoints=checkpoints)[1:] == whole[1:]
