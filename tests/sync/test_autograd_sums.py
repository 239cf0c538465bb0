"""Gradients that autograd adds up by itself: the bits of those that hooks add, and whatever users do meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from models import digest
from torch import nn
from worker_pool import WorkerPool

import paceline as pl
from paceline.comm.single import SingleCommunicator
from paceline.core.world import World
from paceline.sync.autograd_sums import LEAST_MICRO_BATCHES, SWITCH, AutogradSums, obstacle
from paceline.sync.buckets import Bucket
from paceline.sync.buffers import Buffers
from paceline.sync.gradients import BucketedGradients

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
NUM = 6  # micro-batches in a step


class Branches(nn.Module):
    """`left` or `right` is used, depending on the data; `never` is not; `tied` twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never, self.tied = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.left(x) if x[0, 0] > 0 else self.right(x)
        return self.tied(torch.tanh(self.tied(nn.functional.dropout(hidden, 0.2))))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


Work = Callable[[pl.Trainer, torch.Tensor], None]


def once(trainer: pl.Trainer, x: torch.Tensor) -> None:
    trainer.backward(loss_of(trainer.model, x))


def in_parts(trainer: pl.Trainer, x: torch.Tensor) -> None:
    trainer.backward(0.3 * loss_of(trainer.model, x))
    trainer.backward(0.7 * trainer.model(x).abs().mean())


def bare(trainer: pl.Trainer, x: torch.Tensor) -> None:
    loss_of(trainer.model, x).backward()


def zeroing(trainer: pl.Trainer, x: torch.Tensor, *, set_to_none: bool) -> None:
    """What many loops do out of habit."""
    loss = loss_of(trainer.model, x)
    trainer.optimizer.zero_grad(set_to_none=set_to_none)
    trainer.backward(loss)


def small(x: torch.Tensor) -> int:
    """As weight: some micro-batches weigh as much as others, some differ, some have none."""
    return int((x[:, 0] > 0.3).sum())


def train(work: Work, build: Callable[[], nn.Module] = Branches, **settings: Any) -> tuple[str, int, int]:
    """A digest of what two epochs make of model and optimizer, in how many micro-batches autograd added, and during
    how many backwards the exchange began."""
    settings = {"data": X, "global_batch": 24, "micro_batch": 2, "quiet": True, **settings}
    with pl.Trainer.setup(build, lambda p: torch.optim.AdamW(p, lr=0.01), **settings) as trainer:
        exchange = trainer._run.loop._exchange
        num_added = num_begun = 0
        for epoch in trainer.epochs(2):
            for batch in epoch:
                work(trainer, batch)
                num_added += exchange._autograd_sums.have_grown
                num_begun += bool(exchange._pending)
                trainer.step()
        return digest(trainer.model.state_dict(), trainer.optimizer.state_dict()), num_added, num_begun


def compare(monkeypatch: pytest.MonkeyPatch, work: Work, **settings: Any) -> int:
    """Train with the switch on and off: the same bits. In how many micro-batches autograd added."""
    mine, num_added, _ = train(work, **settings)
    monkeypatch.setenv(SWITCH, "0")
    theirs, none_added, _ = train(work, **settings)
    assert none_added == 0
    assert mine == theirs
    return num_added


ZEROING = [partial(zeroing, set_to_none=True), partial(zeroing, set_to_none=False)]


@pytest.mark.parametrize(("work", "is_small"), [*product([once, *ZEROING], [True, False]), (in_parts, False)])
def test_the_bits_are_those_of_hooks(monkeypatch: pytest.MonkeyPatch, work: Work, is_small: bool) -> None:
    if not is_small:
        monkeypatch.setattr("paceline.sync.gradients.BUCKET_BYTES", 0)  # hooks for all, as in a larger model
    # Two steps in each of two epochs, of 12 micro-batches; the first of a step is not added by autograd.
    assert compare(monkeypatch, work, max_grad_norm=0.1) == 4 * 11


@pytest.mark.parametrize("is_small", [True, False])
def test_bits_where_weights_differ(monkeypatch: pytest.MonkeyPatch, is_small: bool) -> None:
    if not is_small:
        monkeypatch.setattr("paceline.sync.gradients.BUCKET_BYTES", 0)
    assert 0 < compare(monkeypatch, once, weight_fn=small) < 4 * 11


def test_a_bare_backward_is_taken_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(monkeypatch, bare) == 0


def test_a_bare_backward_beside_one_of_the_run() -> None:
    def both(trainer: pl.Trainer, x: torch.Tensor) -> None:
        bare(trainer, x)
        once(trainer, x)

    def twice(trainer: pl.Trainer, x: torch.Tensor) -> None:
        loss = loss_of(trainer.model, x)
        trainer.backward(loss + loss)

    def weights(work: Work) -> torch.Tensor:
        with pl.Trainer.setup(
            lambda: nn.Linear(6, 6), lambda p: torch.optim.SGD(p, lr=0.1), data=X, global_batch=24, micro_batch=2
        ) as trainer:
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    work(trainer, batch)
                    trainer.step()
            return trainer.model.weight.detach().clone()

    torch.testing.assert_close(weights(both), weights(twice))


def test_steps_of_few_micro_batches_have_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(monkeypatch, once, micro_batch=8) == 0  # three in a step


def two_buckets() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 1 << 19), nn.Linear(1 << 19, 4))


@pytest.mark.parametrize(("build", "num_begun"), [(Branches, 0), (two_buckets, 4)])
def test_workers_agree(pool: WorkerPool, build: Callable[[], nn.Module], num_begun: int) -> None:
    """Four steps of 12 micro-batches. Where there are several buckets, they leave during a step's last backward."""
    settings = {"build": build, "global_batch": 48, "data": torch.cat([X, X]), "shares": "equal"}
    mine, others = pool.run(partial(train, once, **settings), 2)
    assert mine == others
    assert mine[1:] == (4 * 11 - num_begun, num_begun)
    by_hooks = (mine[0], 0, num_begun)
    assert pool.run(_without, 2, settings) == [by_hooks, by_hooks]


def _without(settings: dict[str, Any]) -> tuple[str, int, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        return train(once, **settings)


def gradients(
    pattern: tuple[int, ...], *, prepare: Callable[[nn.Module], object] = lambda _: None, **settings: Any
) -> list[torch.Tensor | None]:
    """The mean after the second of two steps. `pattern`: the micro-batches' weights; 2 uses a part of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    prepare(model)
    alone = SingleCommunicator(World())
    exchange = BucketedGradients(
        dict(model.named_parameters()), alone, Buffers(model, alone), max_micro_batches=NUM, **settings
    )
    for _ in range(2):
        exchange.begin_step((range(NUM),), total_weight=sum(pattern))
        for number, weight in enumerate(pattern):
            exchange.begin_micro_batch(number, weight, is_last=number == NUM - 1)
            used = model[1:] if weight == 2 else model
            loss = loss_of(used, X[5 * number : 5 * number + 5])
            exchange.backward(torch.Tensor.backward, loss)
            assert exchange.has_gradient()
            exchange.end_micro_batch(loss.detach())
        exchange.send()
        assert exchange.finish() is not None
    exchange.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    return [p.grad for p in model.parameters()]


PATTERNS = [(1, 1, 1, 1, 1, 1), (0, 1, 1, 1, 0, 1), (1, 0, 1, 2, 1, 0), (2, 2, 1, 2, 1, 2), (3, 1, 3, 2, 3, 3)]


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_weights_and_parameters(
    monkeypatch: pytest.MonkeyPatch, pattern: tuple[int, ...], bucket_bytes: int
) -> None:
    mine = gradients(pattern, bucket_bytes=bucket_bytes)
    monkeypatch.setenv(SWITCH, "0")
    theirs = gradients(pattern, bucket_bytes=bucket_bytes)
    for own, other in zip(mine, theirs, strict=True):
        assert own is not None
        assert torch.equal(own, other)


def test_the_mean_is_right() -> None:
    pattern = (3, 1, 3, 2, 3, 3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    for number, weight in enumerate(pattern):
        used = model[1:] if weight == 2 else model
        (loss_of(used, X[5 * number : 5 * number + 5]) * weight / sum(pattern)).backward()
    for own, parameter in zip(gradients(pattern, bucket_bytes=1), model.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad)


def test_a_hook_of_the_users_sees_each_gradient_not_the_sum() -> None:
    seen: list[torch.Tensor] = []

    def watch(model: nn.Module) -> None:
        model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))  # type: ignore[union-attr]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    pattern = (1,) * NUM
    alone = SingleCommunicator(World())
    watch(model)
    exchange = BucketedGradients(
        dict(model.named_parameters()), alone, Buffers(model, alone), max_micro_batches=NUM, bucket_bytes=1
    )
    exchange.begin_step((range(NUM),), total_weight=NUM)
    for number in range(NUM):
        exchange.begin_micro_batch(number, pattern[number], is_last=number == NUM - 1)
        exchange.backward(torch.Tensor.backward, loss_of(model, X[5 * number : 5 * number + 5]))
        exchange.end_micro_batch(None)
    assert len(seen) == NUM
    exchange.send()
    exchange.finish()
    expected = [torch.autograd.grad(loss_of(model, X[5 * n : 5 * n + 5]), model[0].weight)[0] for n in range(NUM)]
    for own, gradient in zip(seen, expected, strict=True):
        assert torch.equal(own, gradient)
    torch.testing.assert_close(model[0].weight.grad, torch.stack(expected).mean(0))


def test_after_an_error_in_backward_no_parameter_keeps_a_place_in_a_bucket() -> None:
    model = nn.Linear(6, 6)
    alone = SingleCommunicator(World())
    exchange = BucketedGradients(
        dict(model.named_parameters()), alone, Buffers(model, alone), max_micro_batches=NUM, bucket_bytes=1
    )

    def fail(_: torch.Tensor) -> None:
        assert all(parameter.grad is not None for parameter in model.parameters())
        raise KeyError("in backward")

    exchange.begin_step((range(NUM),), total_weight=NUM)
    exchange.begin_micro_batch(0, 1, is_last=False)
    exchange.backward(torch.Tensor.backward, loss_of(model, X[:5]))
    exchange.end_micro_batch(None)
    exchange.begin_micro_batch(1, 1, is_last=False)
    with pytest.raises(KeyError):
        exchange.backward(fail, loss_of(model, X[:5]))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not exchange.has_gradient()


def test_a_micro_batch_without_a_gradient_is_an_error_wherever_it_comes() -> None:
    other = nn.Linear(6, 6)
    with pl.Trainer.setup(
        lambda: nn.Linear(6, 6), lambda p: torch.optim.SGD(p, lr=0.1), data=X, global_batch=24, micro_batch=2
    ) as trainer:
        for number, batch in enumerate(next(iter(trainer.epochs(1)))):
            trainer.backward(loss_of(trainer.model if number < 5 else other, batch))
            if number == 5:
                with pytest.raises(pl.MisuseError, match="none of the run's parameters"):
                    trainer.step()
                break
            trainer.step()


def bucket_of(dtype: torch.dtype, sum_dtype: torch.dtype) -> Bucket:
    return Bucket({"p": torch.zeros(3, dtype=dtype)}, sum_dtype, SingleCommunicator(World()), 0)


def test_reasons() -> None:
    assert obstacle([bucket_of(torch.float32, torch.float32)], exact=False) is None
    assert obstacle([bucket_of(torch.float64, torch.float64)], exact=False) is None
    assert "exact mode" in str(obstacle([], exact=True))
    mixed = [bucket_of(torch.float32, torch.float32), bucket_of(torch.bfloat16, torch.float32)]
    assert obstacle(mixed, exact=False) == "torch.bfloat16 is too coarse to add up in"


@pytest.mark.parametrize(("num", "is_said"), [(LEAST_MICRO_BATCHES, True), (LEAST_MICRO_BATCHES - 1, False)])
def test_the_log_says_why_not_where_it_would_matter(caplog: pytest.LogCaptureFixture, num: int, is_said: bool) -> None:
    with caplog.at_level(logging.INFO, logger="paceline"):
        AutogradSums([], [], exact=True, max_micro_batches=num)
    assert ("autograd does not add up gradients by itself: exact mode" in caplog.text) == is_said


def test_the_log_names_the_switch(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with caplog.at_level(logging.INFO, logger="paceline"):
        AutogradSums([], [bucket_of(torch.float32, torch.float32)], exact=False, max_micro_batches=NUM)
    assert f"by itself: {SWITCH}=0" in caplog.text
