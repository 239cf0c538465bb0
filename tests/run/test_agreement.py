"""What must be the same on every worker: a difference is an error that names it, on all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest
from torch import nn
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.comm.single import SingleCommunicator
from paceline.core.world import World
from paceline.errors import MisuseError
from paceline.run.step import replica
from paceline.run.step.checks import Agreement

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def train(
    after_step: Callable[[pl.Trainer], object] = lambda _: None,
    before_step: Callable[[pl.Trainer], object] = lambda _: None,
    **settings: Any,
) -> str:
    """`before_step` and `after_step` stand in the loop's body: workers without a share do not run them."""
    settings = {"data": X, "global_batch": 8, "micro_batch": 4, "shuffle": False, **settings}
    with pl.Trainer.setup(build, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **grouped(**settings)) as trainer:
        for epoch in trainer.epochs(2):
            for batch in epoch:
                trainer.backward(trainer.model(batch).square().mean())
                before_step(trainer)
                if trainer.step():
                    after_step(trainer)
        return digest(trainer.model.state_dict(), trainer.optimizer.state_dict())


def of_groups(**values: Any) -> Callable[[pl.Trainer], None]:
    def change(trainer: pl.Trainer) -> None:
        for group in trainer.optimizer.param_groups:
            group.update(values)

    return change


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0.025}, r"'lr' in group 0 of SGD is 0\.1 on rank 1 and 0\.025 on rank 0"),
        ({"momentum": 0.5}, r"'momentum' in group 0 of SGD is 0\.9 on rank 1 and 0\.5 on rank 0"),
        ({"weight_decay": 1e-4}, r"'weight_decay' in group 0 of SGD is 0 on rank 1 and 0\.0001 on rank 0"),
    ],
)
def test_a_hyper_parameter_that_some_workers_change_is_named(
    values: dict[str, float], message: str, pool: WorkerPool
) -> None:
    """Rank 0 takes all micro-batches, so only it runs the loop's body."""

    def program() -> str:
        return train(of_groups(**values), shares=[1.0, 0.0])

    with pytest.raises(WorkersFailed, match=message + ".*scheduler=.*trainer.set_lr.*trainer.every"):
        pool.run(program, 2)


def test_the_optimizer_among_several_of_one_type_is_named_by_its_group(pool: WorkerPool) -> None:
    """Groups are counted over all optimizers, as in set_lr."""

    def program() -> None:
        def optimizers(parameters: list[torch.Tensor]) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.SGD(parameters[2:], lr=0.2)]

        with pl.Trainer.setup(
            build, optimizers, data=X, global_batch=8, micro_batch=4, balancing=pl.Balancing(shares=[1.0, 0.0])
        ) as trainer:
            for batch in next(trainer.epochs(1)):
                trainer.backward(trainer.model(batch).square().mean())
                trainer.optimizer[0].param_groups[0]["lr"] = 0.05
                trainer.step()

    with pytest.raises(WorkersFailed, match=r"'lr' in group 0 of SGD is 0\.1 on rank 1 and 0\.05 on rank 0"):
        pool.run(program, 2)


def test_on_gpus_all_workers_explain_a_difference_after_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the numbers arrive earlier on one of them: its messages would meet the gradients of the others."""

    def explained_after(*, has_arrived: bool) -> int:
        world = World(rank=0, size=2, device=torch.device("cuda"))
        agreement: Any = Agreement(SimpleNamespace(), SimpleNamespace(world=world))  # type: ignore[arg-type]
        for step in range(10):
            numbers: Any = SimpleNamespace(digests=[1, 2], has_arrived=has_arrived)
            with suppress(MisuseError):
                agreement.check(numbers, now=False)
                continue
            return step
        return -1

    def explain(_: Agreement) -> None:
        raise MisuseError

    monkeypatch.setattr(Agreement, "_explain", explain)
    assert explained_after(has_arrived=False) == explained_after(has_arrived=True) >= 0


def test_a_scheduler_in_the_loop_body_is_found_on_three_workers(pool: WorkerPool) -> None:
    def program() -> str:
        schedulers: list[Any] = []

        def step(trainer: pl.Trainer) -> None:
            if not schedulers:
                schedulers.append(torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5))
            schedulers[0].step()

        return train(step, shares=[1.0, 1.0, 0.0])

    with pytest.raises(WorkersFailed, match=r"'lr' in group 0 of SGD is 0\.1 on rank 2 and 0\.05 on rank 0"):
        pool.run(program, 3)


def test_changed_on_all_workers_alike_it_is_right(pool: WorkerPool) -> None:
    def program() -> str:
        return train(of_groups(lr=0.025), shares="equal", exact=True)

    assert {program(), *pool.run(program, 2)} == {program()}


@pytest.mark.parametrize("exact", [True, False])
def test_set_lr_in_the_loop_body_holds_on_every_worker(exact: bool, pool: WorkerPool) -> None:
    def program(shares: Any = "equal") -> str:
        return train(before_step=lambda t: t.set_lr(0.1 / (1 + t.position.step)), shares=shares, exact=exact)

    def by_hand() -> str:
        torch.manual_seed(0)
        with pl.Trainer.setup(
            build, lambda p: torch.optim.SGD(p, lr=0.1), data=X, global_batch=8, runtime=pl.Runtime(quiet=True)
        ) as t:
            model = t.model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            for x in X[8 * (step % 3) : 8 * (step % 3) + 8].split(4):
                (model(x).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return f"{sum(p.double().sum().item() for p in model.parameters()):.5f}"

    def summed(shares: Any) -> str:
        totals = []
        train(
            before_step=lambda t: t.set_lr(0.1 / (1 + t.position.step)),
            after_step=lambda t: totals.append(sum(p.double().sum().item() for p in t.model.parameters())),
            shares=shares,
            exact=exact,
        )
        return f"{totals[-1]:.5f}" if totals else ""

    assert summed("equal") == by_hand()
    for shares in ([1.0, 0.0], [1.0, 1.0], [0.0, 0.0, 1.0]):
        assert by_hand() in pool.run(summed, len(shares), shares)
        outcomes = set(pool.run(program, len(shares), shares))
        assert len(outcomes) == 1
        assert not exact or outcomes == {program()}


def test_set_lr_that_differs_is_refused(pool: WorkerPool) -> None:
    def program() -> str:
        return train(before_step=lambda t: t.set_lr(0.1 * (1 + t.world.rank)), shares="equal")

    with pytest.raises(
        WorkersFailed, match=r"set_lr\(0\.1, group=-1\) on rank 0 and set_lr\(0\.2, group=-1\) on rank 1"
    ):
        pool.run(program, 2)


def test_set_lr_of_one_group_in_a_hook() -> None:
    model = build()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    with pl.Trainer.setup(model, torch.optim.SGD(groups, lr=0.1), data=X, global_batch=8) as trainer:
        trainer.every(1, lambda _: trainer.set_lr(0.5, group=1))
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(trainer.model(batch).square().mean())
                trainer.step()
        assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.1, 0.5]
        with pytest.raises(ValueError, match="group=2: the optimizers have 2 parameter groups, counted from 0"):
            trainer.set_lr(0.1, group=2)
        with pytest.raises(ValueError, match=r"lr=-1\.0: choose a finite number >= 0"):
            trainer.set_lr(-1)


@pytest.mark.parametrize("micro_batch", [4, 8])
def test_a_step_of_the_optimizer_by_somebody_else_is_refused(micro_batch: int, pool: WorkerPool) -> None:
    def program() -> str:
        return train(before_step=lambda t: t.optimizer.step(), micro_batch=micro_batch)

    message = r"SGD.step\(\) was called on an optimizer that belongs to the trainer.*remove this call"
    with pytest.raises(pl.errors.MisuseError, match=message):
        program()
    with pytest.raises(WorkersFailed, match=message):
        pool.run(program, 2)


def test_a_grad_scaler_of_the_users_own_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def scaled(trainer: pl.Trainer) -> None:
        scaler.scale(torch.ones(1))
        scaler.step(trainer.optimizer)

    with pytest.raises(pl.errors.MisuseError, match=r"remove this call \(also scaler.step\(optimizer\)\)"):
        train(before_step=scaled)


def test_a_closed_trainer_gives_the_optimizer_back() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Trainer.setup(model, optimizer, data=X, global_batch=8):
        pass
    model(X).square().mean().backward()
    before = model[0].weight.clone()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_fp16_without_the_trainers_backward_is_refused(pool: WorkerPool) -> None:
    def program() -> None:
        with pl.Trainer.setup(
            build, lambda p: torch.optim.SGD(p, lr=0.1), data=X, global_batch=8, precision="fp16"
        ) as trainer:
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    with trainer.autocast():
                        loss = trainer.model(batch).float().square().mean()
                    loss.backward()
                    trainer.step()

    message = (
        r"precision='fp16' scales the loss before backward: call trainer.backward\(loss\) instead of loss.backward"
    )
    with pytest.raises(pl.errors.MisuseError, match=message):
        program()
    with pytest.raises(WorkersFailed, match=message):
        pool.run(program, 2)


def test_a_rate_that_changes_in_every_step_describes_no_parameter_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 300 parameters that took a millisecond per step."""
    lengths: list[int] = []

    def dumps(value: Any) -> str:
        text = json.dumps(value)
        lengths.append(len(text))
        return text

    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(50)])
    alone = SingleCommunicator(World(device=torch.device("cpu")))
    own = replica.Replica(model, lambda parameters: torch.optim.AdamW(parameters), None, alone, seed=0)
    monkeypatch.setattr(replica, "json", SimpleNamespace(dumps=dumps))
    digests = []
    for rate in (0.1, 0.2, 0.2, 0.1):
        own.set_learning_rate(rate)
        digests.append(own.digest())
    assert digests[0] == digests[3] != digests[1] == digests[2]
    assert max(lengths) < 1000
    model[0].requires_grad_(False)
    own.take_changes()
    assert own.digest() != digests[3]
