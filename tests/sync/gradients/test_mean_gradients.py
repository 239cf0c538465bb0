"""What autograd can do to gradients, and what the exchange makes of it: the right mean, or a clear refusal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest
from thread_workers import thread_workers
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from worker_pool import WorkerPool

import paceline as pl
from paceline.comm.single import SingleCommunicator
from paceline.core.world import World
from paceline.sync.buffers import Buffers
from paceline.sync.gradients.exchange import MeanGradients

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


class Branches(nn.Module):
    """`left` or `right` is used, depending on the data; `never` is not; `tied` twice; `frozen` has no gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(6, 6, dtype=dtype) for _ in range(3))
        self.tied = nn.Linear(6, 6, bias=False, dtype=dtype)
        self.also_tied = nn.Linear(6, 6, bias=False, dtype=dtype)
        self.also_tied.weight = self.tied.weight
        self.frozen = nn.Linear(6, 6, dtype=dtype).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.left(x) if x[0, 0] > 0 else self.right(x)
        return self.also_tied(torch.tanh(self.frozen(self.tied(hidden))))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def run(
    step: Callable[[pl.Trainer, torch.Tensor], None] = lambda t, x: t.backward(loss_of(t.model, x)),
    build: Callable[[], nn.Module] = Branches,
    epochs: int = 3,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    settings = {"data": X, "global_batch": 8, "micro_batch": 2, "shuffle": False, **settings}
    with pl.Trainer.setup(
        build, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5), **grouped(**settings)
    ) as trainer:
        for epoch in trainer.epochs(epochs):
            for batch in epoch:
                step(trainer, batch)
                trainer.step()
        return {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}


def reference(build: Callable[[], nn.Module] = Branches, epochs: int = 3) -> dict[str, torch.Tensor]:
    """The same by hand: each step the mean over four micro-batches' gradients, unused parameters left alone."""
    with pl.Trainer.setup(build, lambda p: torch.optim.SGD(p, lr=0.0), data=X, global_batch=8) as trainer:
        model = trainer.model
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01, weight_decay=0.5)
    for _ in range(epochs):
        for batch in X.to(next(model.parameters()).dtype).split(8):
            for micro_batch in batch.split(2):
                (loss_of(model, micro_batch) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    for key, value in expected.items():
        torch.testing.assert_close(
            actual[key], value, rtol=tolerance, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("exact", [False, True])
def test_branches_frozen_tied_and_unused(exact: bool, pool: WorkerPool) -> None:
    expected = reference()
    assert torch.equal(expected["never.weight"], run(exact=exact)["never.weight"])  # no weight decay either
    assert_same(run(exact=exact), expected)
    for size in (2, 3):
        outcomes = pool.run(lambda exact=exact: run(exact=exact), size)
        for outcome in outcomes:
            assert_same(outcome, expected)
            assert digest(outcome) == digest(outcomes[0])


def test_bare_backward_is_legal() -> None:
    assert digest(run(lambda t, x: loss_of(t.model, x).backward())) == digest(run())


def test_several_losses_add_up(pool: WorkerPool) -> None:
    def twice(trainer: pl.Trainer, x: torch.Tensor) -> None:
        loss = loss_of(trainer.model, x)
        trainer.backward(0.25 * loss_of(trainer.model, x))
        trainer.backward(0.75 * loss)

    assert_same(run(twice), run())
    for outcome in pool.run(lambda: run(twice), 2):
        assert_same(outcome, run())


def test_several_losses_do_not_depend_on_the_split_in_exact_mode(pool: WorkerPool) -> None:
    def twice(trainer: pl.Trainer, x: torch.Tensor) -> None:
        trainer.backward(0.3 * loss_of(trainer.model, x))
        trainer.backward(0.7 * loss_of(trainer.model, x))

    alone = digest(run(twice, exact=True))
    assert {digest(outcome) for outcome in pool.run(lambda: run(twice, exact=True), 3)} == {alone}


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_fires_hooks_more_than_once(reentrant: bool, pool: WorkerPool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.other = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.other(x)
            for _ in range(3):
                x = checkpoint(self.layer, x, use_reentrant=reentrant)
            return self.layer(x)

    expected = reference(Twice)
    assert_same(run(build=Twice), expected)
    for outcome in pool.run(lambda: run(build=Twice), 2):
        assert_same(outcome, expected)


def test_gradients_that_reach_no_hook_are_taken_all_the_same(pool: WorkerPool) -> None:
    def by_hand(trainer: pl.Trainer, x: torch.Tensor) -> None:
        used = [p for p in trainer.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss_of(trainer.model, x), used, allow_unused=True)
        for parameter, gradient in zip(used, gradients, strict=True):
            parameter.grad = gradient

    assert_same(run(by_hand), run())
    for outcome in pool.run(lambda: run(by_hand), 2):
        assert_same(outcome, run())


def test_a_backward_between_micro_batches_is_not_ours() -> None:
    def with_a_detour(trainer: pl.Trainer, x: torch.Tensor) -> None:
        trainer.backward(loss_of(trainer.model, x))
        trainer.step()
        loss_of(trainer.model, x).backward()

    with pl.Trainer.setup(
        Branches,
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5),
        data=X,
        global_batch=8,
        micro_batch=2,
        shuffle=False,
    ) as trainer:
        for epoch in trainer.epochs(3):
            for batch in epoch:
                with_a_detour(trainer, batch)
        assert digest(dict(trainer.model.state_dict())) == digest(run())


def test_sparse_layers_are_refused_when_the_run_is_set_up() -> None:
    with pytest.raises(pl.errors.MisuseError, match=r"'emb' is built with sparse=True.*sparse=False"):
        run(build=lambda: nn.Sequential(dict_of(emb=nn.Embedding(6, 6, sparse=True))))


def dict_of(**modules: nn.Module) -> Any:
    from collections import OrderedDict

    return OrderedDict(modules)


def test_sparse_gradients_are_refused_when_they_appear() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.embedding(x[:, 0].abs().long() % 6, self.table, sparse=True)

    with pytest.raises(pl.errors.GradientError, match=r"'table' has a sparse gradient.*sparse=False"):
        run(build=Hidden)


def test_sync_batch_norm_is_refused() -> None:
    with pytest.raises(pl.errors.MisuseError, match="SyncBatchNorm, which exchanges inside forward"):
        run(build=lambda: nn.Sequential(nn.SyncBatchNorm(6)))


@pytest.mark.parametrize("exact", [False, True])
def test_float64_models(exact: bool) -> None:
    actual = run(build=lambda: Branches(torch.float64), data=X.double(), exact=exact)
    assert actual["left.weight"].dtype == torch.float64
    # Exact mode is exact to its grid, which has fewer bits than float64.
    assert_same(actual, reference(lambda: Branches(torch.float64)), 1e-12 if not exact else 1e-8)


def test_bfloat16_parameters_sum_in_float32() -> None:
    actual = run(build=lambda: Branches(torch.bfloat16), data=X.bfloat16())
    assert actual["left.weight"].dtype == torch.bfloat16


def test_fp16_overflow_skips_the_step_and_halves_the_scale(pool: WorkerPool) -> None:
    outcomes = pool.run(half_precision_run, 2)
    assert digest(outcomes[0]) == digest(outcomes[1])
    records, moved_after_skip = half_precision_run()
    assert [skipped for _, skipped in records[:2]] == [True, True]  # 65536 and 32768 times 1e4 overflow fp16
    assert not records[-1][1]
    assert not moved_after_skip
    assert records == outcomes[0][0]


def half_precision_run() -> tuple[list[tuple[int, bool]], bool]:
    records: list[tuple[int, bool]] = []
    moved_after_skip = False
    with pl.Trainer.setup(
        lambda: nn.Linear(6, 6),
        lambda p: torch.optim.SGD(p, lr=1e-6),
        data=X,
        global_batch=8,
        micro_batch=2,
        precision="fp16",
        exact=True,
        balancing=pl.Balancing(shares="equal"),  # a worker without a share has no record of the step
    ) as trainer:
        for epoch in trainer.epochs(16):
            for batch in epoch:
                before = trainer.model.weight.clone()
                with trainer.autocast():
                    loss = trainer.model(batch).float().sum() * 1e4
                trainer.backward(loss)
                if record := trainer.step():
                    records.append((record.step, record.is_skipped))
                    moved_after_skip |= record.is_skipped and not torch.equal(before, trainer.model.weight)
    return records, moved_after_skip


def fp16_run(loss_of: Callable[[torch.Tensor, int], torch.Tensor], num_steps: int) -> tuple[list[bool], float]:
    """Whether each step was skipped, and the loss scale at the end."""
    skipped: list[bool] = []
    with pl.Trainer.setup(
        lambda: nn.Linear(6, 6), lambda p: torch.optim.SGD(p, lr=1e-9), data=X[:2], global_batch=2, precision="fp16"
    ) as trainer:
        trainer.every(1, lambda record: skipped.append(record.is_skipped))
        for epoch in trainer.epochs(num_steps):
            for batch in epoch:
                with trainer.autocast():
                    output = trainer.model(batch)
                trainer.backward(loss_of(output.float(), trainer.position.step))
                trainer.step()
        assert trainer.run.loop.loss_scale is not None
        return skipped, trainer.run.loop.loss_scale.value


def test_fp16_scales_large_losses_down() -> None:
    """Their gradients overflow at scale 1 too, and as they are in float32 do not."""
    skipped, _ = fp16_run(lambda output, _: output.square().mean() * 1e7, 40)
    assert skipped[0]
    assert not any(skipped[30:])


def test_fp16_skips_a_loss_that_is_not_finite_and_keeps_the_scale() -> None:
    skipped, scale = fp16_run(lambda output, step: output.mean() * (math.nan if step < 60 else 1.0), 61)
    assert skipped == [True] * 60 + [False]
    assert scale == 65536.0


def test_fp16_does_not_skip_all_steps_of_a_run() -> None:
    with pytest.raises(pl.errors.NonFiniteError, match=r"^100 steps in a row were skipped, up to step 102, .*bf16"):
        fp16_run(lambda output, step: output.mean() * (1.0 if step < 2 else math.nan), 200)


@contextmanager
def two_replicas(build: Callable[[], nn.Module], **settings: Any) -> Iterator[list[tuple[nn.Module, MeanGradients]]]:
    replicas = []
    for member in thread_workers(2):
        torch.manual_seed(0)
        model = build()
        exchange = MeanGradients(
            dict(model.named_parameters()), member, Buffers(model, member), max_micro_batches=2, **settings
        )
        replicas.append((model, exchange))
    yield replicas
    for _, exchange in replicas:
        exchange.close()


def one_step(replicas: list[tuple[nn.Module, MeanGradients]], work: Callable[[nn.Module, int], None]) -> None:
    """Each replica one micro-batch, in one thread: all start their exchange before any waits for it."""
    for rank, (model, exchange) in enumerate(replicas):
        exchange.begin_step((range(1), range(1, 2)))
        exchange.begin_micro_batch(rank, 1, is_last=True)
        work(model, rank)
        exchange.end_micro_batch(None)
    for _, exchange in replicas:
        exchange.send()
    for _, exchange in replicas:
        exchange.finish()


def test_buckets_leave_during_the_last_backward_once_its_pattern_is_known() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    with two_replicas(build, bucket_bytes=1) as replicas:
        sent: list[int] = []

        def work(model: nn.Module, rank: int) -> None:
            loss_of(model, X[rank : rank + 1]).backward()
            sent.append(len(replicas[rank][1]._pending))

        one_step(replicas, work)
        one_step(replicas, work)
        assert sent == [0, 0, 7, 7]  # eight parameters, a bucket each; the last waits for the step's numbers
        gradients = [[p.grad for p in model.parameters()] for model, _ in replicas]
        for mine, theirs in zip(*gradients, strict=True):
            assert torch.equal(mine, theirs)


def test_a_gradient_after_its_exchange_began_is_an_error_not_a_wrong_sum() -> None:
    with two_replicas(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), bucket_bytes=1) as replicas:
        one_step(replicas, lambda model, rank: loss_of(model, X[rank : rank + 1]).backward())

        def twice(model: nn.Module, rank: int) -> None:
            loss_of(model, X[rank : rank + 1]).backward()
            loss_of(model, X[rank : rank + 1]).backward()

        with pytest.raises(pl.errors.GradientError, match=r"'1\.bias' got a gradient after.*overlap=False"):
            one_step(replicas, twice)


@pytest.mark.parametrize("exact", [False, True])
def test_an_empty_parameter_may_be_alone_in_its_bucket(exact: bool) -> None:
    """As the empty one by which a module finds its device, if the parameters after it fill the other buckets."""

    class WithDummy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dummy = nn.Parameter(torch.empty(0))
            self.weight = nn.Parameter(torch.ones(6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    with two_replicas(WithDummy, bucket_bytes=1, exact=exact, overlap=False) as replicas:
        (model, first), (_, second) = replicas
        for exchange in (first, second):
            exchange._is_calibrated = True  # calibration would wait for the other replica, in this thread
        one_step(replicas, lambda model, rank: loss_of(model, X[rank : rank + 1]).backward())
        assert model.dummy.grad is None
        assert model.weight.grad is not None


def test_without_overlap_a_changed_pattern_is_no_error() -> None:
    with two_replicas(lambda: nn.Linear(6, 6), bucket_bytes=1, overlap=False) as replicas:
        one_step(replicas, lambda model, rank: loss_of(model, X[rank : rank + 1]).backward())
        once = [p.grad.clone() for p in replicas[0][0].parameters()]

        def twice(model: nn.Module, rank: int) -> None:
            loss_of(model, X[rank : rank + 1]).backward()
            loss_of(model, X[rank : rank + 1]).backward()

        one_step(replicas, twice)
        for parameter, gradient in zip(replicas[0][0].parameters(), once, strict=True):
            torch.testing.assert_close(parameter.grad, 2 * gradient)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("pattern", [(1, 1, 1), (0, 1, 1), (1, 0, 1), (2, 1, 2), (1, 2, 1)])
def test_the_cut_into_buckets_does_not_show(pattern: tuple[int, ...], exact: bool) -> None:
    """`pattern`: each micro-batch's weight; one of weight 2 uses only a part of the parameters."""

    def gradients(bucket_bytes: int | None) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
        alone = SingleCommunicator(World())
        exchange = MeanGradients(
            dict(model.named_parameters()),
            alone,
            Buffers(model, alone),
            max_micro_batches=3,
            bucket_bytes=bucket_bytes,
            exact=exact,
        )
        for _ in range(2):
            exchange.begin_step((range(3),), total_weight=sum(pattern))
            for number, weight in enumerate(pattern):
                exchange.begin_micro_batch(number, weight, is_last=number == 2)
                used = model[1:] if weight == 2 else model
                loss_of(used, X[5 * number : 5 * number + 5]).backward()
                exchange.end_micro_batch(torch.tensor(float(number)))
            exchange.send()
            numbers = exchange.finish()
            assert numbers is not None
            assert numbers.losses == [number if weight else 0.0 for number, weight in enumerate(pattern)]
        exchange.close()
        return [p.grad for p in model.parameters()]

    for one, several in zip(gradients(None), gradients(1), strict=True):
        assert one is not None
        assert several is not None
        assert torch.equal(one, several)


def test_during_a_micro_batch_the_gradient_is_its_own(pool: WorkerPool) -> None:
    """So that gradients can be logged: every micro-batch, in every mode, on every number of workers."""

    def watched(**settings: Any) -> None:
        def step(trainer: pl.Trainer, x: torch.Tensor) -> None:
            used = [p for p in trainer.model.parameters() if p.requires_grad]
            expected = torch.autograd.grad(loss_of(trainer.model, x), used, allow_unused=True)
            trainer.backward(loss_of(trainer.model, x))
            for parameter, gradient in zip(used, expected, strict=True):
                assert (parameter.grad is None) == (gradient is None)
                if gradient is not None:
                    torch.testing.assert_close(parameter.grad, gradient)

        run(step, **settings)

    for settings in ({}, {"exact": True}, {"global_batch": 2}):
        watched(**settings)
        for size in (2, 3):
            pool.run(lambda settings=settings: watched(**settings), size)
