"""Exact steps of one term per worker: the bits of sums that were rounded first."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from models import digest
from torch import nn
from worker_pool import WorkerPool

import paceline as pl
from paceline.comm.base import Pending
from paceline.comm.single import SingleCommunicator
from paceline.core.world import World
from paceline.sync.buckets import CPU_BLOCK, Anchored
from paceline.sync.grid import Grid
from paceline.sync.terms import (
    SWITCH,
    TermBucket,
    are_single,
    obstacle,
    scratch_memory,
    steps_per_one,
    weights_by_rank,
)

X = torch.randn(26, 6, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """BatchNorm, dropout, a parameter that only some micro-batches use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40)
        self.left, self.right, self.never = (nn.Linear(40, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.norm(self.wide(x))), 0.2)
        return self.left(hidden) if x[0, 0] > 0 else self.right(hidden)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def once(trainer: pl.Trainer, x: torch.Tensor) -> None:
    trainer.backward(loss_of(trainer.model, x))


def in_parts(trainer: pl.Trainer, x: torch.Tensor) -> None:
    trainer.backward(0.3 * trainer.model(x).square().mean())
    trainer.backward(0.7 * trainer.model(x).abs().mean())


def train(work: Callable[[pl.Trainer, torch.Tensor], None], **settings: Any) -> tuple[str, list[bool]]:
    """A digest of what three epochs make of model and optimizer, and which steps were of single terms."""
    single: list[bool] = []

    def note(_: object) -> None:
        exchange = trainer._run.loop._exchange
        single.append(exchange._buckets is exchange._terms)

    settings = {"data": X, "max_grad_norm": 0.1, "exact": True, "quiet": True, **settings}
    with pl.Trainer.setup(Model, lambda p: torch.optim.AdamW(p, lr=0.01), **settings) as trainer:
        trainer.every(1, note)
        for epoch in trainer.epochs(3):
            for batch in epoch:
                work(trainer, batch)
                trainer.step()
        return digest(trainer.model.state_dict(), trainer.optimizer.state_dict()), single


def counted(x: torch.Tensor) -> int:
    return int((x[:, 0] > 0).sum())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"global_batch": 8, "micro_batch": 4}, id="halves, and a tail"),
        pytest.param({"global_batch": 9, "micro_batch": 3}, id="thirds, whose weight has no end"),
        pytest.param({"global_batch": 8, "micro_batch": 4, "weight_fn": counted}, id="a total that nobody knows"),
    ],
)
def test_runs_of_single_terms_have_the_bits_of_a_run_alone(settings: dict[str, Any], pool: WorkerPool) -> None:
    alone, single = train(once, **settings)
    assert not any(single)
    for size in (2, 3):
        for others, single in pool.run(partial(train, once, shares="equal", **settings), size):
            assert others == alone, size
            assert all(single) == (settings["global_batch"] // settings["micro_batch"] <= size)


def test_a_gradient_that_comes_in_parts_is_no_single_term(pool: WorkerPool) -> None:
    settings = {"global_batch": 8, "micro_batch": 4}
    alone, _ = train(in_parts, **settings)
    for others, single in pool.run(partial(train, in_parts, shares="equal", **settings), 2):
        assert others == alone
        assert not any(single)
        assert len(single) == 12  # the step that was repeated counts once


def test_a_worker_that_takes_all_micro_batches_adds_them_up(pool: WorkerPool) -> None:
    settings = {"global_batch": 8, "micro_batch": 4}
    alone, _ = train(once, **settings)
    for others, single in pool.run(partial(train, once, shares=(1.0, 0.0), **settings), 2):
        assert others == alone
        # The last step of an epoch of 26 samples has one micro-batch.
        assert single == [False, False, False, True] * 3


class SeeingAll(SingleCommunicator):
    """Stands for a communicator whose workers see each other's numbers; `_add_up` is called by hand."""

    def combine(self, tensor: torch.Tensor, combination: Any) -> Pending:
        raise NotImplementedError


def nasty(grid: Grid, numel: int, seed: int, *, finite: bool = False) -> torch.Tensor:
    """Of all magnitudes that fit, half-way between two values of the grid, zeros of both signs, inf and NaN."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(grid.top - 85, grid.top - 3, (numel,), generator=generator).double()
    values = torch.randn(numel, generator=generator).clamp(-4, 4).double() * 2.0**exponents
    half_way = (torch.randint(-999, 999, (numel,), generator=generator) + 0.5) * grid.step * 2
    values[::3] = half_way[::3]
    values[-4:] = torch.tensor([0.0, -0.0, *((0.0, 0.0) if finite else (math.inf, math.nan))])
    return values.float()[torch.randperm(numel, generator=generator)]


def rounded_first(grid: Grid, terms: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """The sum in float64 of terms that are rounded to the grid one by one."""
    total = torch.zeros_like(terms[0], dtype=torch.float64)
    for term, weight in zip(terms, weights, strict=True):
        total += (term.double() * weight + grid.anchor) - grid.anchor
    return total


def make_bucket(grid: Grid, numel: int, dtype: torch.dtype = torch.float32) -> TermBucket:
    parameter = nn.Parameter(torch.zeros(numel, dtype=dtype))
    return TermBucket({"p": parameter}, dtype, SeeingAll(World()), grid, scratch_memory())


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("weight", [0.5, 0.0, 3.0, 1 / 3])
@pytest.mark.parametrize("divisor", [None, 7.0])
def test_terms_are_weighted_rounded_and_added_as_by_workers_that_round_first(
    num_workers: int, weight: float, divisor: float | None
) -> None:
    grid = Grid(top=5)
    bucket = make_bucket(grid, 2 * CPU_BLOCK + 17)
    terms = [nasty(grid, bucket.flat.numel(), seed) for seed in range(num_workers)]
    weights = [weight if rank != 1 else 0.5 for rank in range(num_workers)]
    expected = rounded_first(grid, terms, weights)
    by = None if divisor is None else torch.tensor(divisor, dtype=torch.float64)
    if by is not None:
        expected /= by
    bucket.weigh(weights, by, [math.nan] * num_workers)
    bucket._add_up(terms, bucket.flat)
    assert torch.equal(bucket.flat.view(torch.int32), expected.float().view(torch.int32))


# The lowest and the highest are as far as float32 goes.
@pytest.mark.parametrize("top", [-75, -20, 5, 60, 127])
@pytest.mark.parametrize("weights", [[0.5, 0.5], [1.0, 0.25]])
def test_two_terms_are_added_in_float32_with_the_bits_of_float64(top: int, weights: list[float]) -> None:
    grid = Grid(top)
    bucket = make_bucket(grid, 5 * CPU_BLOCK + 17)
    terms = [nasty(grid, bucket.flat.numel(), seed, finite=True) for seed in range(2)]
    terms[1][:1000] = -terms[0][:1000]
    peaks = [weight * term.abs().max().item() for weight, term in zip(weights, terms, strict=True)]
    expected = rounded_first(grid, terms, weights).float()
    assert not torch.equal(expected, sum(w * term for w, term in zip(weights, terms, strict=True)))
    bucket.weigh(weights, None, peaks)
    assert bucket._counts is not None
    bucket.flat.copy_(terms[0])
    bucket._add_up([bucket.flat, terms[1]], bucket.flat)  # as the communicator calls it
    assert torch.equal(bucket.flat.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(
    ("top", "weights", "peaks", "counts"),
    [
        (51, [0.5, 2.0], [1e9, 1e9], [0.5, 2.0]),
        (52, [0.5, 2.0], [1e9, 1e9], [0.25, 1.0]),
        (51, [0.5, 3.0], [1e9, 1e9], None),  # products would be rounded
        (51, [0.5, 0.0], [1e9], None),
        (51, [1.0, 1.0, 1.0], [1e9, 1e9, 1e9], None),  # a sum of three is rounded twice
        (51, [1.0, 1.0], [1e16, 1e9], None),  # does not fit the grid
        (51, [1.0, 1.0], [math.inf, 1e9], None),
        (51, [1.0, 1.0], [1e9, math.nan], None),
        (-80, [1.0, 1.0], [2.0**-90, 2.0**-90], None),  # 2**131 is beyond float32
    ],
)
def test_float32_is_enough_for_two_finite_terms_whose_weights_are_powers_of_two(
    top: int, weights: list[float], peaks: list[float], counts: list[float] | None
) -> None:
    assert steps_per_one(Grid(top), weights, peaks) == counts


def test_only_float32_terms_without_a_divisor_are_added_in_float32() -> None:
    grid = Grid(top=5)
    bucket = make_bucket(grid, 16)
    bucket.weigh([0.5, 0.5], torch.tensor(2.0, dtype=torch.float64), [1.0, 1.0])
    assert bucket._counts is None
    bucket = make_bucket(grid, 16, torch.float64)
    bucket.weigh([0.5, 0.5], None, [1.0, 1.0])
    assert bucket._counts is None


@pytest.mark.parametrize(("weight", "is_one_pass"), [(0.5, True), (12.0, True), (2**29 - 1, True), (1 / 3, False)])
def test_a_product_is_anchored_in_one_pass_where_it_is_exact(weight: float, is_one_pass: bool) -> None:
    grid = Grid(top=30)
    term = nasty(Grid(top=1), 4096, seed=9)
    anchored = Anchored(grid.anchor, weight, term)
    assert (anchored._start is not None) == is_one_pass
    expected = term.double() * weight + grid.anchor
    assert torch.equal(anchored(term.double()).view(torch.int64), expected.view(torch.int64))


def test_float64_terms_are_never_anchored_in_one_pass() -> None:
    assert Anchored(1.0, 0.5, torch.zeros(3, dtype=torch.float64))._start is None


def test_a_switch_turns_single_terms_off(pool: WorkerPool) -> None:
    def switched_off() -> tuple[str, list[bool]]:
        with mock.patch.dict(os.environ, {SWITCH: "0"}):
            return train(once, shares="equal", global_batch=8, micro_batch=4)

    alone, _ = train(once, global_batch=8, micro_batch=4)
    for others, single in pool.run(switched_off, 2):
        assert others == alone
        assert not any(single)


def test_single_terms_need_workers_that_see_each_other_and_one_micro_batch_each() -> None:
    def reason(num_micro_batches: int, communicator_type: type = SeeingAll, dtype: Any = torch.float32) -> str | None:
        communicator = communicator_type(World())
        communicator.world = World(rank=0, size=3, local_size=3)
        return obstacle(communicator, {"p": torch.zeros(2, dtype=dtype)}, num_micro_batches)

    assert reason(2) is reason(3) is reason(2, dtype=torch.float64) is None
    assert reason(1) == "a step has 1 micro-batches, not one for each of 3 workers"
    assert reason(4) == "a step has 4 micro-batches, not one for each of 3 workers"
    assert reason(2, SingleCommunicator) == "they do not see each other's memory"
    assert reason(2, dtype=torch.bfloat16) == "parameter 'p' is torch.bfloat16"


def test_a_plan_of_single_terms_and_its_weights() -> None:
    plan = (range(1), range(1, 1), range(1, 2))
    assert are_single(plan)
    assert not are_single((range(2), range(2, 2)))
    assert weights_by_rank(plan, [4.0, 3.0]) == [4.0, 0.0, 3.0]
