"""Models and optimizers as users have them: compiled, checkpointed, with outputs and parameter groups of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from models import digest, mlp, vectors
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from worker_pool import WorkerPool

import paceline as pl

X, Y = vectors(24)

Loss = Callable[[Any, Any], torch.Tensor]


def plain_loss(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def run(build: Callable[[], Any] = mlp, loss_of: Loss = plain_loss, optimizer: Any = adam) -> str:
    """Two epochs in exact mode; a digest of the weights in the order of the model's parameters."""
    with pl.Trainer.setup(
        build, optimizer, data=(X, Y), global_batch=8, micro_batch=2, exact=True, runtime=pl.Runtime(quiet=True)
    ) as trainer:
        for epoch in trainer.epochs(2):
            for batch in epoch:
                trainer.backward(loss_of(trainer.model, batch))
                trainer.step()
        return digest([p.detach() for p in trainer.model.parameters()])


class Dropping(nn.Module):
    """Two blocks with dropout, whose activations may be computed again in backward."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.5)) for _ in range(2)])
        self.last = nn.Linear(12, 4)
        self._recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._recompute else block(x)
        return self.last(x)


def test_gradient_checkpointing_changes_nothing(pool: WorkerPool) -> None:
    def recomputed() -> str:
        return run(lambda: Dropping(recompute=True))

    expected = run(lambda: Dropping(recompute=False))
    assert recomputed() == expected
    assert pool.run(recomputed, 2) == [expected] * 2


def test_a_compiled_model_trains_like_the_plain_one(pool: WorkerPool) -> None:
    def compiled() -> str:
        return run(lambda: torch.compile(mlp(), backend="eager"))

    expected = run()
    assert compiled() == expected
    assert pool.run(compiled, 2) == [expected] * 2


def test_the_model_may_be_used_without_gradients_inside_the_loop(pool: WorkerPool) -> None:
    """As for a teacher's targets or a metric: also after backward, when an exchange may be under way."""

    def with_metrics() -> str:
        def loss_of(model: Any, batch: Any) -> torch.Tensor:
            with torch.no_grad():
                before = model(batch.x)
            loss = plain_loss(model, batch)
            with torch.inference_mode():
                assert torch.equal(model(batch.x), before)
            return loss

        return run(loss_of=loss_of)

    expected = run()
    assert with_metrics() == expected
    assert pool.run(with_metrics, 2) == [expected] * 2


class Scores(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class Returning(nn.Module):
    """The MLP, with its output in something."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.body = mlp()
        self._wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self._wrap(self.body(x))


@pytest.mark.parametrize(
    ("wrap", "logits_of"),
    [
        (lambda y: (y, y.detach()), lambda outputs: outputs[0]),
        (lambda y: {"logits": y, "aside": [y]}, lambda outputs: outputs["logits"]),
        (lambda y: Scores(y, y.detach()), lambda outputs: outputs.logits),
    ],
)
def test_models_may_return_anything(wrap: Any, logits_of: Any) -> None:
    loss_of: Loss = lambda model, batch: functional.cross_entropy(logits_of(model(batch.x)), batch.y)  # noqa: E731
    assert run(lambda: Returning(wrap), loss_of) == run()


def by_kind(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def test_parameter_groups_have_settings_of_their_own(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = mlp()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    reference = mlp()
    reference.load_state_dict(state)
    optimizer = by_kind(list(reference.parameters()))
    for epoch_x, epoch_y in [(X, Y)] * 2:
        for x, y in zip(epoch_x.split(8), epoch_y.split(8), strict=True):
            optimizer.zero_grad()
            functional.cross_entropy(reference(x), y).backward()
            optimizer.step()

    def grouped() -> list[torch.Tensor]:
        model = mlp()
        model.load_state_dict(state)
        with pl.Trainer.setup(
            model, by_kind, data=(X, Y), global_batch=8, micro_batch=2, shuffle=False, runtime=pl.Runtime(quiet=True)
        ) as trainer:
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    trainer.backward(plain_loss(trainer.model, batch))
                    trainer.step()
            assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.01, 0.02]
        return [p.detach() for p in model.parameters()]

    for weights in [grouped(), *pool.run(grouped, 2)]:
        for weight, expected in zip(weights, reference.parameters(), strict=True):
            torch.testing.assert_close(weight, expected.detach(), rtol=1e-4, atol=1e-5)
