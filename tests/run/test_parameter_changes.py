"""Parameters that are frozen, unfrozen and added between two steps, as progressive training does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest
from torch import nn
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6)])
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()

    def grow(self) -> list[torch.Tensor]:
        """One more block, whose weights do not depend on who makes it."""
        block = nn.Linear(6, 6)
        with torch.no_grad():
            block.weight.copy_(torch.eye(6) + 0.1)
            block.bias.zero_()
        self.blocks.append(block)
        return list(block.parameters())


# What happens after which step: to the model, the optimizer.
CHANGES: dict[str, dict[int, Callable[[Any, Any], object]]] = {
    "freeze": {2: lambda m, _: m.blocks[0].requires_grad_(False)},
    "unfreeze": {
        1: lambda m, _: m.head.requires_grad_(False),
        3: lambda m, _: m.head.requires_grad_(True),
    },
    "the other half": {
        1: lambda m, _: m.head.requires_grad_(False),
        3: lambda m, _: (m.head.requires_grad_(True), m.blocks.requires_grad_(False)),
    },
    "add": {2: lambda m, o: o.add_param_group({"params": m.grow(), "lr": 0.05})},
    "add and remove": {
        1: lambda m, o: o.add_param_group({"params": m.grow()}),
        4: lambda m, _: m.blocks[1].requires_grad_(False),
    },
}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def train(name: str, where: str = "hook", max_steps: int = 8, **settings: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """`where` changes are made: in a hook, or in the loop's body."""
    settings = {"data": X, "global_batch": 8, "micro_batch": 2, "shuffle": False, **settings}
    with pl.Trainer.setup(Growing, optimizer_of, **grouped(**settings)) as trainer:

        def change(record: pl.StepRecord) -> None:
            if record.step in CHANGES[name]:
                CHANGES[name][record.step](trainer.model, trainer.optimizer)

        if where == "hook":
            trainer.every(1, change)
        for epoch in trainer.epochs(max_steps=max_steps):
            for batch in epoch:
                trainer.backward(trainer.model(batch))
                if (record := trainer.step()) and where == "body":
                    change(record)
        state = {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}
        return digest(state, trainer.optimizer.state_dict()), state


def by_hand(name: str) -> dict[str, torch.Tensor]:
    with pl.Trainer.setup(Growing, optimizer_of, data=X, global_batch=8) as trainer:
        model = trainer.model
    optimizer = optimizer_of(list(model.parameters()))
    for step in range(8):
        for x in X[8 * (step % 4) : 8 * (step % 4) + 8].split(2):
            (model(x) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in CHANGES[name]:
            CHANGES[name][step + 1](model, optimizer)
    return model.state_dict()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_as_plain_pytorch_would_on_every_number_of_workers(name: str, exact: bool, pool: WorkerPool) -> None:
    expected = by_hand(name)
    alone, state = train(name, exact=exact)
    for outcome in [
        (alone, state),
        *pool.run(partial(train, name, exact=exact), 2),
        *pool.run(partial(train, name, exact=exact), 3),
    ]:
        assert not exact or outcome[0] == alone
        for key, value in expected.items():
            torch.testing.assert_close(outcome[1][key], value, rtol=1e-5, atol=1e-6)


def test_in_the_loop_body_too_where_all_workers_have_shares(pool: WorkerPool) -> None:
    alone, _ = train("add", exact=True)
    outcomes = [
        train("add", "body", exact=True),
        *pool.run(partial(train, "add", "body", exact=True, shares="equal"), 2),
    ]
    assert {outcome[0] for outcome in outcomes} == {alone}


def test_a_change_on_some_workers_only_is_refused_by_all(pool: WorkerPool) -> None:
    message = r"parameter 'blocks\.1\.weight' is trained on rank 0 and not on rank 1.*trainer\.every"
    with pytest.raises(WorkersFailed, match=message):
        pool.run(partial(train, "add", "body", shares=[1.0, 0.0]), 2)
    with pytest.raises(WorkersFailed, match=r"parameter 'blocks\.0\.weight' is trained on rank 1 and not on rank 0"):
        pool.run(partial(train, "freeze", "body", shares=[1.0, 0.0]), 2)


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_sets_that_alternate_use_the_same_shared_memory(shard: Any, pool: WorkerPool) -> None:
    """It is freed at the end of the run."""

    def allocated() -> list[int]:
        ends: list[int] = []

        def alternate(record: pl.StepRecord) -> None:
            trainer.model.head.requires_grad_(record.step % 2 == 0)
            trainer.model.blocks.requires_grad_(record.step % 2 == 1)
            ends.append(communicator._peers.own._end)

        settings = {"data": X, "global_batch": 4, "micro_batch": 2, "shard": shard}
        with pl.Trainer.setup(Growing, optimizer_of, **grouped(**settings)) as trainer:
            communicator: Any = trainer.run.communicator
            trainer.every(1, alternate)
            for batch in next(trainer.epochs(1)):
                trainer.backward(trainer.model(batch))
                trainer.step()
        return ends

    for ends in pool.run(allocated, 2):
        assert len(ends) == 8
        assert len(set(ends[3:])) == 1


def test_averaging_refuses_parameters_that_are_trained_later(pool: WorkerPool) -> None:
    """Each worker would train them on its own. Those that are frozen are averaged as they are."""

    def change(is_trained_first: bool) -> int:
        def build() -> Growing:
            model = Growing()
            model.blocks.requires_grad_(is_trained_first)
            return model

        with pl.Trainer.setup(
            build, optimizer_of, data=X, global_batch=8, micro_batch=2, strategy=pl.Averaging(every=2)
        ) as trainer:
            trainer.every(2, lambda _: trainer.model.blocks.requires_grad_(not is_trained_first))
            for batch in next(trainer.epochs(1)):
                trainer.backward(trainer.model(batch))
                trainer.step()
        return trainer.position.step

    with pytest.raises(WorkersFailed, match=r"parameter 'blocks\.0\.weight' is trained now and was not at the set-up"):
        pool.run(change, 2, False)
    assert pool.run(change, 2, True) == [4, 4]


def test_new_parameters_have_the_values_of_rank_0(pool: WorkerPool) -> None:
    def program() -> str:
        def grow(record: pl.StepRecord) -> None:
            if record.step == 2:
                trainer.model.blocks.append(nn.Linear(6, 6))
                nn.init.constant_(trainer.model.blocks[1].bias, float(trainer.world.rank))
                trainer.optimizer.add_param_group({"params": trainer.model.blocks[1].parameters()})

        settings = {"data": X, "global_batch": 8, "micro_batch": 2, "exact": True}
        with pl.Trainer.setup(Growing, optimizer_of, **grouped(**settings)) as trainer:
            trainer.every(1, grow)
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    trainer.backward(trainer.model(batch))
                    trainer.step()
            return digest(trainer.model.state_dict())

    assert set(pool.run(program, 2)) == {program()}


@pytest.mark.parametrize("name", ["freeze", "unfreeze"])
@pytest.mark.parametrize("stop_at", [2, 5])
def test_through_a_checkpoint(name: str, stop_at: int, tmp_path: Path, pool: WorkerPool) -> None:
    """The resumed run knows which parameters were trained, though the hook that froze them does not run again."""
    whole, _ = train(name, exact=True)
    checkpoints = pl.Checkpoints(tmp_path, every_steps=1)
    train(name, exact=True, max_steps=stop_at, checkpoints=checkpoints)
    outcomes = pool.run(partial(train, name, exact=True, checkpoints=checkpoints), 2)
    assert {outcome[0] for outcome in outcomes} == {whole}


@pytest.mark.parametrize("stop_at", [2, 5])
def test_a_group_of_unfrozen_parameters_through_a_checkpoint(stop_at: int, tmp_path: Path, pool: WorkerPool) -> None:
    """The optimizer begins with the head alone; the rest comes with `add_param_group` after step 2."""

    def program(max_steps: int, checkpoints: pl.Checkpoints | None = None) -> str:
        def build() -> Growing:
            model = Growing()
            model.blocks.requires_grad_(False)
            return model

        def unfreeze(record: pl.StepRecord) -> None:
            if record.step == 2:
                trainer.model.blocks.requires_grad_(True)
                trainer.optimizer.add_param_group({"params": trainer.model.blocks.parameters(), "lr": 0.01})

        settings = {"data": X, "global_batch": 8, "micro_batch": 2, "exact": True, "checkpoints": checkpoints}
        with pl.Trainer.setup(build, optimizer_of, **grouped(**settings)) as trainer:
            trainer.every(1, unfreeze)
            for epoch in trainer.epochs(max_steps=max_steps):
                for batch in epoch:
                    trainer.backward(trainer.model(batch))
                    trainer.step()
            return digest(trainer.model.state_dict(), trainer.optimizer.state_dict())

    checkpoints = pl.Checkpoints(tmp_path, every_steps=1)
    program(stop_at, checkpoints)
    assert set(pool.run(partial(program, 8, checkpoints), 2)) == {program(8)}


def test_an_average_of_the_weights_follows(pool: WorkerPool) -> None:
    def program() -> str:
        with pl.Trainer.setup(
            Growing,
            optimizer_of,
            data=X,
            global_batch=8,
            micro_batch=2,
            exact=True,
            optimization=pl.Optimization(ema=0.9),
        ) as t:
            t.every(1, lambda r: CHANGES["add"].get(r.step, lambda *_: None)(t.model, t.optimizer))
            for epoch in t.epochs(2):
                for batch in epoch:
                    t.backward(t.model(batch))
                    t.step()
            with t.ema_weights():
                return digest(t.model.state_dict())

    assert set(pool.run(program, 2)) == {program()}
