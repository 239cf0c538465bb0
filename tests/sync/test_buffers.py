"""Buffers: the same after a step whoever ran its micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest
from torch import nn
from worker_pool import WorkerPool

import paceline as pl

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)) * 3 + 1


def run(build: Callable[[], nn.Module], epochs: int = 2, **settings: Any) -> nn.Module:
    """Learning rate 0: only buffers move. Twenty samples make steps of 4 and of 1 micro-batch."""
    settings = {"global_batch": 16, "micro_batch": 4, "shuffle": False, **settings}
    with pl.Trainer.setup(build, lambda p: torch.optim.SGD(p, lr=0.0), data=X, **grouped(**settings)) as trainer:
        for epoch in trainer.epochs(epochs):
            for batch in epoch:
                trainer.backward(trainer.model(batch).square().mean())
                trainer.step()
        return trainer.model


def one_after_another(build: Callable[[], nn.Module], epochs: int = 2) -> nn.Module:
    model = copy.deepcopy(run(build, epochs=0))
    for _ in range(epochs):
        for micro_batch in X.split(4):
            model(micro_batch)
    return model


@pytest.mark.parametrize("momentum", [0.1, 0.5, 1.0, None])
@pytest.mark.parametrize("exact", [False, True])
def test_batch_norm_ends_as_if_micro_batches_ran_one_after_another(
    momentum: float | None, exact: bool, pool: WorkerPool
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=momentum))

    expected = one_after_another(build)[1]
    alone = run(build, exact=exact)[1]
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(alone, name), getattr(expected, name), rtol=1e-5, atol=1e-6)
    assert int(alone.num_batches_tracked) == int(expected.num_batches_tracked) == 10
    for size in (2, 3):
        for model in pool.run(lambda: run(build, exact=exact), size):
            for name, buffer in model[1].named_buffers():
                torch.testing.assert_close(buffer, getattr(expected, name), rtol=1e-5, atol=1e-6)
            if exact:
                assert digest(dict(model[1].named_buffers())) == digest(dict(alone.named_buffers()))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("what", ["momentum", "statistics"])
def test_a_momentum_that_changes_and_statistics_that_are_replaced(what: str, exact: bool, pool: WorkerPool) -> None:
    """As by a schedule of momentum, after the first of two epochs."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=0.5))

    def change(model: nn.Module) -> None:
        if what == "momentum":
            model[1].momentum = 0.01
        else:
            model[1].running_mean = torch.ones(5)

    def trained() -> nn.Module:
        with pl.Trainer.setup(
            build, lambda p: torch.optim.SGD(p, lr=0.0), data=X, global_batch=16, micro_batch=4, shuffle=False,
            exact=exact,
        ) as trainer:  # fmt: skip
            trainer.every_epoch(1, lambda number: change(trainer.model) if number == 0 else None)
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    trainer.backward(trainer.model(batch).square().mean())
                    trainer.step()
            return trainer.model[1]

    expected = copy.deepcopy(run(build, epochs=0))
    for epoch in range(2):
        for micro_batch in X.split(4):
            expected(micro_batch)
        if epoch == 0:
            change(expected)
    for layer in (trained(), *pool.run(trained, 2)):
        for name, buffer in layer.named_buffers():
            torch.testing.assert_close(buffer, getattr(expected[1], name), rtol=1e-5, atol=1e-6)


def test_batch_norm_in_evaluation_mode_is_untouched(pool: WorkerPool) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 5)
            self.norm = nn.BatchNorm1d(5)
            self.norm.running_mean += 0.3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norm.eval()
            return self.norm(self.layer(x))

    for model in pool.run(lambda: run(Frozen, exact=True), 2):
        assert torch.equal(model.norm.running_mean, torch.full((5,), 0.3))
        assert int(model.norm.num_batches_tracked) == 0


class Remembering(nn.Module):
    """Buffers that forward changes in its own way: in place, by replacement, of any type; and one it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("last_mean", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("is_positive", torch.zeros((), dtype=torch.bool))
        self.register_buffer("constant", torch.full((3,), float("-inf")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last_mean.copy_(x.mean())
        self.seen = self.seen + len(x)
        self.is_positive.fill_(bool(x.mean() > 0))
        return self.layer(x)


@pytest.mark.parametrize("exact", [False, True])
def test_other_buffers_take_the_last_micro_batchs_value(exact: bool, pool: WorkerPool) -> None:
    with pytest.warns(UserWarning, match="buffer 'last_mean' changes during forward") as warned:
        alone = run(Remembering, exact=exact)
    assert sum("last_mean" in str(w.message) for w in warned) == 1
    assert not any("constant" in str(w.message) for w in warned)
    # Every micro-batch of a step starts from the step's first value: four steps, so 4 + 4 + 4 + 4 samples were counted.
    assert int(alone.seen) == 16
    assert torch.equal(alone.last_mean, X[16:20].mean())
    for size in (2, 3):
        for model in pool.run(lambda: run(Remembering, exact=exact), size):
            assert digest(dict(model.named_buffers())) == digest(dict(alone.named_buffers()))


def test_a_cache_that_grows_stays_local() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)
            self.register_buffer("table", torch.zeros(1), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(self.table) < len(x):
                self.table = torch.arange(float(len(x)))
            return self.layer(x) + self.table[: len(x), None]

    assert len(run(Cached).table) == 4


class KeepsActivations(nn.Module):
    """A buffer with the last activations, whose size is the micro-batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("activations", torch.zeros(4, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.activations = self.layer(x).detach()
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:buffer 'activations' changes during forward")
def test_a_buffer_of_the_micro_batchs_size_stays_local(pool: WorkerPool) -> None:
    """Micro-batches of 4, 4, 4 and 2 samples: in one step, workers have different sizes."""

    def sizes() -> list[int]:
        found: list[int] = []
        with pl.Trainer.setup(
            KeepsActivations, lambda p: torch.optim.SGD(p, lr=0.0), data=X[:14], global_batch=8, micro_batch=4,
            shuffle=False, balancing=pl.Balancing(shares="equal"),
        ) as trainer:  # fmt: skip
            trainer.every(1, lambda _: found.append(len(trainer.model.activations)))

            def freeze(_: object) -> None:  # changes the exchanged numbers
                trainer.model.layer.bias.requires_grad_(False)

            trainer.every_epoch(1, freeze)
            for epoch in trainer.epochs(3):
                for batch in epoch:
                    trainer.backward(trainer.model(batch).square().mean())
                    trainer.step()
        return found

    assert sizes() == [4, 2] * 3
    assert pool.run(sizes, 2) == [[4, 4] * 3, [4, 2] * 3]


def test_a_tail_of_one_sample_names_the_remedy() -> None:
    build = lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))  # noqa: E731
    with (
        pytest.raises(ValueError, match=r"ends with a micro-batch of 1 sample.*another micro_batch than 19.*drop_last"),
        pl.Trainer.setup(build, lambda p: torch.optim.SGD(p), data=X, global_batch=19, shuffle=False) as trainer,
    ):
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(trainer.model(batch).mean())
                trainer.step()
