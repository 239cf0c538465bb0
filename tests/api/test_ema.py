"""The average of the weights: what it is, that it is saved, and that it leaves no trace in the training."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl
from paceline.run.step.checks import UpdateCheck

DECAY = 0.9
X, Y = vectors(48)


def setup(model: Any = mlp, **settings: Any) -> pl.Trainer:
    settings = {"data": (X, Y), "global_batch": 8, "micro_batch": 4, "exact": True, "quiet": True, **settings}
    return pl.Trainer.setup(model, lambda params: torch.optim.Adam(params, lr=0.01), **grouped(**settings))


def train(trainer: pl.Trainer, epochs: int = 1) -> None:
    dtype = next(trainer.model.parameters()).dtype
    for epoch in trainer.epochs(epochs):
        for batch in epoch:
            trainer.backward(functional.cross_entropy(trainer.model(batch.x.to(dtype)), batch.y))
            trainer.step()


def weights_of(trainer: pl.Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def averaged(trainer: pl.Trainer) -> list[torch.Tensor]:
    with trainer.ema_weights():
        return weights_of(trainer)


def follow(trainer: pl.Trainer, decay: float) -> list[torch.Tensor]:
    """The average by hand, in float64: brought up to date after every step."""
    averages = [weight.double() for weight in weights_of(trainer)]

    def update(_: pl.StepRecord) -> None:
        for average, weight in zip(averages, weights_of(trainer), strict=True):
            average.mul_(decay).add_(weight, alpha=1 - decay)

    trainer.every(1, update)
    return averages


def test_it_is_the_average_by_hand() -> None:
    with setup(ema=DECAY) as trainer:
        assert all(map(torch.equal, averaged(trainer), weights_of(trainer))), "it begins with the weights"
        expected = follow(trainer, DECAY)
        train(trainer)
        for average, by_hand, weight in zip(averaged(trainer), expected, weights_of(trainer), strict=True):
            torch.testing.assert_close(average.double(), by_hand, rtol=1e-5, atol=1e-7)
            assert not torch.allclose(average, weight, atol=1e-4)


def run(
    ema: float | None, root: Path | None = None, *, until: int | None = None, evaluates: bool = False
) -> tuple[str, str | None]:
    """Digests of the run and of its average."""
    with setup(ema=ema, checkpoints=root and pl.Checkpoints(root)) as trainer:
        if until is not None:
            trainer.every(1, lambda record: trainer.request_stop() if record.step == until - 1 else None)
        if evaluates:
            trainer.every(2, lambda _: digest(averaged(trainer)))
        with suppress(pl.errors.Stopped):
            train(trainer, 2)
        return (
            digest(trainer.model.state_dict(), trainer.optimizer.state_dict()),
            None if ema is None else digest(averaged(trainer)),
        )


def test_it_leaves_no_trace_in_the_training_and_is_the_same_on_any_number_of_workers(pool: WorkerPool) -> None:
    course, average = run(DECAY, evaluates=True)
    assert run(None) == (course, None)
    assert pool.run(run, 2, DECAY) == [(course, average)] * 2


def test_it_goes_on_bit_by_bit_when_resumed(tmp_path: Path, pool: WorkerPool) -> None:
    expected = run(DECAY)
    interrupted = run(DECAY, tmp_path, until=5)
    assert interrupted != expected
    assert run(DECAY, tmp_path) == expected
    pool.run(lambda: run(DECAY, tmp_path / "two", until=5), 2)
    assert run(DECAY, tmp_path / "two") == expected


def test_checkpoints_hold_it_as_a_component(tmp_path: Path) -> None:
    with setup(ema=DECAY, checkpoints=pl.Checkpoints(tmp_path)) as trainer:
        assert trainer.state_components()["ema"] == "replicated"
        with pytest.raises(ValueError, match="'ema' is taken"):
            trainer.register("ema", pl.EarlyStopping())
        train(trainer)
    with pytest.raises(pl.errors.CheckpointError, match="holds state of ema, which was not registered"):
        run(None, tmp_path)
    with setup(checkpoints=pl.Checkpoints(tmp_path), skip=["ema"]) as trainer:
        train(trainer, 2)
    with pytest.raises(pl.errors.CheckpointError, match="has no component 'ema'"):
        setup(ema=DECAY, checkpoints=pl.Checkpoints(tmp_path))
    with setup(ema=DECAY, checkpoints=pl.Checkpoints(tmp_path), skip=["ema"]) as trainer:
        assert all(map(torch.equal, averaged(trainer), weights_of(trainer))), "it begins with the weights it finds"


def test_the_models_own_weights_come_back_also_after_an_error() -> None:
    with setup(ema=DECAY) as trainer:
        train(trainer)
        before = digest(trainer.model.state_dict())
        own = trainer.evaluate((X, Y), loss_of)
        with trainer.ema_weights():
            assert trainer.evaluate((X, Y), loss_of) != own
        with pytest.raises(ZeroDivisionError), trainer.ema_weights():
            assert digest(trainer.model.state_dict()) != before
            raise ZeroDivisionError
        assert digest(trainer.model.state_dict()) == before
        assert trainer.evaluate((X, Y), loss_of) == own


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def test_an_overflowing_fp16_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = {2, 3}
    allows = UpdateCheck.allows_update
    monkeypatch.setattr(
        UpdateCheck, "allows_update", lambda self, step, *args: allows(self, step, *args) and step not in skipped
    )
    seen: list[str] = []
    with setup(ema=DECAY, precision="fp16") as trainer:
        trainer.every(1, lambda record: seen.append(f"{record.is_skipped} {digest(averaged(trainer))}"))
        train(trainer)
    assert [line.split()[0] for line in seen[:5]] == ["False", "True", "True", "False", "False"]
    averages = [line.split()[1] for line in seen]
    assert averages[0] == averages[1] == averages[2]
    assert len(set(averages[2:])) == len(averages[2:])


def test_coarse_weights_are_averaged_finely() -> None:
    """In bfloat16 most of what a step adds would be rounded away."""
    with setup(lambda: mlp().bfloat16(), ema=0.999, exact=False) as trainer:
        expected = follow(trainer, 0.999)
        train(trainer, 4)
        average = torch.cat([weight.flatten() for weight in averaged(trainer)])
    by_hand = torch.cat([weight.flatten() for weight in expected]).bfloat16()
    assert (average == by_hand).double().mean() > 0.99


def test_compiled_and_plain_models_share_checkpoints(tmp_path: Path) -> None:
    def compiled() -> nn.Module:
        return torch.compile(mlp(), backend="eager")  # type: ignore[return-value]

    with setup(compiled, ema=DECAY, checkpoints=pl.Checkpoints(tmp_path)) as trainer:
        train(trainer)
        expected = digest(averaged(trainer))
    with setup(ema=DECAY, checkpoints=pl.Checkpoints(tmp_path)) as trainer:
        assert digest(averaged(trainer)) == expected


def test_misuse_is_named(tmp_path: Path) -> None:
    with setup() as trainer, pytest.raises(pl.errors.MisuseError, match="has no average of its weights: set a decay"):
        trainer.ema_weights()
    with setup(ema=DECAY, checkpoints=pl.Checkpoints(tmp_path)) as trainer:
        with trainer.ema_weights():
            with pytest.raises(pl.errors.MisuseError, match=r"ema_weights\(\) was called inside ema_weights\(\)"):
                trainer.ema_weights().__enter__()
            with pytest.raises(pl.errors.MisuseError, match=r"cannot be saved inside ema_weights\(\)"):
                trainer.save()
            with pytest.raises(pl.errors.MisuseError, match=r"a step was taken inside ema_weights\(\)"):
                train(trainer)
        trainer.save()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ema": 1.0}, "ema=1.0 must be > 0 and < 1"),
        ({"ema": 0.0}, "ema=0.0 must be > 0 and < 1"),
        ({"ema": float("nan")}, "ema=nan must be"),
        ({"ema": True}, "ema=True must be a number"),
        ({"ema": 0.9, "exact": False, "strategy": pl.Averaging()}, "ema=0.9 needs strategy='gradients' or a cadence"),
    ],
)
def test_bad_settings_name_value_and_remedy(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        setup(**settings)
