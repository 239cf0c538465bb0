"""The mean over the global batch, whatever the micro-batches weigh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import digest
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

IGNORED = -100


def sequences(count: int = 22) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token sequences whose number of valid targets differs from 0 to 9; samples 4 to 7 have none at all."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        inputs = torch.randint(0, 20, (9,), generator=generator)
        targets = torch.randint(0, 20, (9,), generator=generator)
        targets[0 if 4 <= i < 8 else i % 10 :] = IGNORED
        found.append((inputs, targets))
    return found


def build() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))


def valid_tokens(batch: Any) -> int:
    return int((batch.y != IGNORED).sum())


def token_mean(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)


def run(exact: bool, micro_batch: int = 4) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    losses: list[float] = []
    weights: list[float] = []
    with pl.Trainer.setup(
        build,
        lambda p: torch.optim.SGD(p, lr=1.0),
        data=sequences(),
        global_batch=16,
        micro_batch=micro_batch,
        weight_fn=valid_tokens,
        shuffle=False,
        exact=exact,
    ) as trainer:
        trainer.every(1, lambda record: (losses.append(record.loss), weights.append(record.weight)))
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(token_mean(trainer.model, batch.x, batch.y))
                trainer.step()
        return {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}, losses, weights


def giant_batches() -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Each step as one batch: the token mean over all of its sequences at once."""
    with pl.Trainer.setup(build, lambda p: torch.optim.SGD(p, lr=1.0), data=sequences(), global_batch=16) as trainer:
        model = trainer.model
    losses, weights = [], []
    for start in (0, 16):
        part = sequences()[start : start + 16]
        x, y = (torch.stack(column) for column in zip(*part, strict=True))
        loss = token_mean(model, x, y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= parameter.grad
        losses.append(loss.item())
        weights.append(float((y != IGNORED).sum()))
    return {k: v.detach().clone() for k, v in model.state_dict().items()}, losses, weights


@pytest.mark.parametrize("exact", [False, True])
def test_gradient_is_the_token_mean_of_one_giant_batch(exact: bool, pool: WorkerPool) -> None:
    parameters, losses, weights = giant_batches()
    outcomes = [run(exact)]
    for size in (2, 3):
        outcomes += pool.run(run, size, exact)
    for actual, actual_losses, actual_weights in outcomes:
        assert actual_weights == weights
        assert actual_losses == pytest.approx(losses, rel=1e-6)
        for name, expected in parameters.items():
            torch.testing.assert_close(actual[name], expected, rtol=1e-5, atol=1e-6)
    if exact:
        assert len({digest(actual, losses) for actual, losses, _ in outcomes}) == 1


def test_a_step_without_any_weight_changes_nothing(pool: WorkerPool) -> None:
    def nothing_counts() -> tuple[bool, float]:
        with pl.Trainer.setup(
            build,
            lambda p: torch.optim.AdamW(p, weight_decay=0.5),
            data=sequences()[4:8],
            global_batch=4,
            micro_batch=2,
            weight_fn=valid_tokens,
        ) as trainer:
            before = digest(trainer.model.state_dict())
            record = None
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    trainer.backward(token_mean(trainer.model, batch.x, batch.y))  # 0 / 0 = NaN, which is no error
                    record = trainer.step() or record
            return before == digest(trainer.model.state_dict()), trainer.position.step

    assert nothing_counts() == (True, 1)
    assert pool.run(nothing_counts, 2) == [(True, 1)] * 2


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_without_any_weight_leaves_no_trace(exact: bool, pool: WorkerPool) -> None:
    def trained_on(data: Any) -> str:
        with pl.Trainer.setup(
            build,
            lambda p: torch.optim.SGD(p, lr=1.0),
            data=data,
            global_batch=4,
            micro_batch=2,
            weight_fn=valid_tokens,
            shuffle=False,
            exact=exact,
        ) as trainer:
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    trainer.backward(token_mean(trainer.model, batch.x, batch.y))
                    trainer.step()
            return digest(trainer.model.state_dict())

    data = sequences(12)
    expected = trained_on(data[:4] + data[8:])
    assert trained_on(data) == expected
    if exact:
        assert pool.run(lambda: trained_on(data), 2) == [expected] * 2


def test_one_micro_batch_per_step_without_weight() -> None:
    with pl.Trainer.setup(
        build,
        lambda p: torch.optim.AdamW(p, weight_decay=0.5),
        data=sequences()[4:8],
        global_batch=4,
        weight_fn=valid_tokens,
    ) as trainer:
        before = digest(trainer.model.state_dict())
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(token_mean(trainer.model, batch.x, batch.y))
                record = trainer.step()
        assert record is not None
        assert record.weight == 0
        assert before == digest(trainer.model.state_dict())


@pytest.mark.parametrize(("answer", "shown"), [(1.5, "1.5"), (-1, "-1")])
def test_a_weight_must_be_a_count(answer: float, shown: str) -> None:
    with (
        pytest.raises(ValueError, match=rf"weight_fn returned {shown}.*an integer >= 0"),
        pl.Trainer.setup(
            build, lambda p: torch.optim.SGD(p), data=sequences(), global_batch=4, weight_fn=lambda _: answer
        ) as trainer,
    ):
        next(iter(next(iter(trainer.epochs(1)))))
