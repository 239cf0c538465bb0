"""Gradients in fewer bytes: the same bits on all workers and every time, close to those of full precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grouping import grouped
from models import SmallResNet, digest, images, mlp, vectors
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl
from paceline.checkpoint.reader import Checkpoint
from paceline.sync.gradients import exchange


def run(strategy: Any, build: Any = mlp, data: Any = None, *, epochs: int = 2, **settings: Any) -> dict[str, Any]:
    settings = {"global_batch": 8, "micro_batch": 2, "shares": "equal", **settings}
    with pl.Trainer.setup(
        build,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=vectors(64) if data is None else data,
        strategy=strategy,
        **grouped(**settings),
    ) as trainer:
        for epoch in trainer.epochs(epochs):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize(("compress", "tolerance"), [("bf16", 0.02), ("int8", 0.02), ("int4", 0.2), ("sparse", 0.2)])
def test_replicas_agree_repeat_and_are_close(compress: Any, tolerance: float, pool: WorkerPool) -> None:
    def outcomes() -> list[dict[str, torch.Tensor]]:
        compressed = pl.Gradients(compress=compress)
        return [run("gradients"), *(run(compressed, shares=[3, 1, 2]) for _ in range(2))]

    by_rank = pool.run(outcomes, 3)
    for full, first, again in by_rank:
        assert digest(first) == digest(again) == digest(by_rank[0][1]) != digest(full)
        for name, value in full.items():
            torch.testing.assert_close(first[name], value, rtol=tolerance, atol=tolerance)


def test_sums_over_a_million_tokens_fit_into_fp16(pool: WorkerPool) -> None:
    """The total weight is not known before the exchange: what is exchanged are sums, 65536 times the mean and more."""

    def outcomes() -> list[dict[str, torch.Tensor]]:
        by_tokens = {"weight_fn": lambda batch: 1_000_000 + int(batch.y[0])}
        return [run(strategy, **by_tokens) for strategy in ("gradients", pl.Gradients(compress="fp16"))]

    by_rank = pool.run(outcomes, 2)
    assert digest(by_rank[0][1]) == digest(by_rank[1][1])
    for name, value in by_rank[0][0].items():
        torch.testing.assert_close(by_rank[0][1][name], value, rtol=1e-3, atol=1e-3)


def test_buffers_are_not_compressed(pool: WorkerPool) -> None:
    def counts() -> int:
        weights = run(pl.Gradients(compress="int4"), SmallResNet, images(32), epochs=1)
        return int(weights["blocks.0.norm1.num_batches_tracked"])

    assert pool.run(counts, 2) == [16, 16]


def test_what_is_not_sent_is_in_the_residuals(pool: WorkerPool) -> None:
    """A gradient that is always the same: what was applied and the residuals' sum are all gradients."""
    factors = torch.linspace(0.01, 1.0, 9000)

    def run_it() -> tuple[torch.Tensor, torch.Tensor]:
        with pl.Trainer.setup(
            lambda: nn.Linear(9000, 1, bias=False),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            data=torch.zeros(64),
            global_batch=4,
            micro_batch=2,
            strategy=pl.Gradients(compress="sparse"),
            balancing=pl.Balancing(shares="equal"),
        ) as trainer:
            before = trainer.model.weight.detach().clone()
            for _ in next(trainer.epochs(1)):
                trainer.backward((trainer.model.weight * factors).sum())
                trainer.step()
            [residual] = trainer.run.loop.exchange.residuals()  # type: ignore[attr-defined]
            return (trainer.model.weight.detach() - before).view(-1), residual[:9000]

    (change, first), (_, second) = pool.run(run_it, 2)
    assert first.count_nonzero() > 4000
    torch.testing.assert_close(change - 0.1 * (first + second), -0.1 * 16 * factors, rtol=1e-4, atol=1e-4)


def test_a_resumed_run_goes_on_with_its_residuals(tmp_path: Path, pool: WorkerPool) -> None:
    def ends(root: Path, resume: Path | None = None) -> str:
        checkpoints = pl.Checkpoints(root, every_steps=3, keep_last=None, resume=resume or "auto")
        return digest(run(pl.Gradients(compress="sparse"), checkpoints=checkpoints))

    undisturbed = pool.run(ends, 2, tmp_path / "a")
    checkpoint = tmp_path / "a" / "step-00000006"
    saved = [Checkpoint(checkpoint).load("residuals", f"rank-{rank}")["unsent"][0] for rank in range(2)]
    assert not torch.equal(*saved)
    assert pool.run(ends, 2, tmp_path / "b", checkpoint) == undisturbed


def test_residuals_are_those_of_their_parameters_if_buckets_have_other_sizes(tmp_path: Path, pool: WorkerPool) -> None:
    """As when a run that began on CPUs is resumed on GPUs."""

    def residuals(max_steps: int, bucket_bytes: int) -> list[torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "BUCKET_BYTES", bucket_bytes)
            with pl.Trainer.setup(
                mlp,
                lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                data=vectors(64),
                global_batch=8,
                micro_batch=2,
                strategy=pl.Gradients(compress="sparse"),
                checkpoints=pl.Checkpoints(tmp_path),
            ) as trainer:
                for epoch in trainer.epochs(1, max_steps=max_steps):
                    for batch in epoch:
                        trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                        trainer.step()
                return [each.clone() for each in trainer.run.loop.exchange.residuals()]  # type: ignore[attr-defined]

    def before_and_after() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return residuals(3, 1 << 30), residuals(3, 1)

    for before, after in pool.run(before_and_after, 2):
        assert len(before) == 1 < len(after)
        assert torch.equal(torch.cat(before), torch.cat(after))
        assert before[0].any()


@pytest.mark.parametrize("compress", ["int8", "sparse"])
def test_a_step_in_which_fp16_overflows_leaves_no_trace(compress: Any, pool: WorkerPool) -> None:
    """In neither the residuals nor between the parameters of a bucket, where the encoding of one is padded."""

    def skipped_and_losses() -> tuple[list[int], float, float]:
        records: list[pl.StepRecord] = []
        with pl.Trainer.setup(
            mlp,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            data=vectors(64),
            global_batch=8,
            micro_batch=2,
            precision="fp16",
            strategy=pl.Gradients(compress=compress),
        ) as trainer:
            trainer.every(1, records.append)
            for epoch in trainer.epochs(4):
                for batch in epoch:
                    with trainer.autocast():
                        loss = functional.cross_entropy(trainer.model(batch.x), batch.y)
                    trainer.backward(loss * (1e6 if trainer.position.step == 2 else 1.0))
                    trainer.step()
        skipped = [record.step for record in records if record.is_skipped]
        return skipped, records[0].loss, sum(record.loss for record in records[-8:]) / 8

    for skipped, first, last in pool.run(skipped_and_losses, 2):
        assert skipped == [3]
        assert last < 0.8 * first


def test_residuals_through_a_checkpoint_while_a_layer_is_frozen(tmp_path: Path, pool: WorkerPool) -> None:
    """Residuals belong to the parameters that are trained, also where others were trained before."""

    def train(root: Path, until: int) -> str:
        with pl.Trainer.setup(
            mlp,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            data=vectors(64),
            global_batch=8,
            micro_batch=2,
            strategy=pl.Gradients(compress="sparse"),
            checkpoints=pl.Checkpoints(root),
            balancing=pl.Balancing(shares="equal"),
        ) as trainer:
            trainer.every(1, lambda record: trainer.model[0].requires_grad_(not 2 < record.step < 6))
            for epoch in trainer.epochs(2, max_steps=until):
                for batch in epoch:
                    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                    trainer.step()
            return digest(trainer.model.state_dict())

    undisturbed = pool.run(train, 2, tmp_path / "a", 12)
    for stop_at in (4, 8):
        root = tmp_path / str(stop_at)
        pool.run(train, 2, root, stop_at)
        assert pool.run(train, 2, root, 12) == undisturbed


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="compress='int3' is unknown: choose 'fp32', 'bf16'"):
        pl.Gradients(compress="int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exact=True needs strategy='gradients': compressed sums are rounded by each"):
        run(pl.Gradients(compress="int8"), exact=True)


def test_without_compression_it_is_the_default_strategy() -> None:
    assert digest(run(pl.Gradients(), exact=True)) == digest(run("gradients", exact=True))
