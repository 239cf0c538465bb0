"""A worker dies while all workers do something together outside of the steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from elastic_runs import Case, Death, Points, check, digest, expected, launch, loss_of, vectors
from safetensors.torch import load_file
from torch import nn

import paceline as pl
from paceline.run.saving import export

HELD_OUT = vectors(64, seed=9)


def evaluate(here: Points, trainer: pl.Trainer, step: int) -> Any:
    def dying(model: nn.Module, batch: Any) -> Any:
        here("evaluate", step)
        return loss_of(model, batch)

    value = trainer.evaluate(HELD_OUT, dying, micro_batch=4)
    assert isinstance(value, float)
    return value.hex()


def predict(here: Points, trainer: pl.Trainer, step: int) -> Any:
    def dying(model: nn.Module, batch: Any) -> Any:
        here("predict", step)
        return model(batch.x)

    return digest(trainer.predict(HELD_OUT, dying, micro_batch=4))


def evaluate_average(here: Points, trainer: pl.Trainer, step: int) -> Any:
    """Afterwards the model has its own weights again."""
    with trainer.ema_weights():
        return evaluate(here, trainer, step)


def gather(here: Points, trainer: pl.Trainer, step: int) -> Any:
    here("gather", step)
    return trainer.gather([step, torch.ones(2)])[0][0]


def reduce(here: Points, trainer: pl.Trainer, step: int) -> Any:
    here("reduce", step)
    return trainer.reduce(float(step), "max")


def broadcast(here: Points, trainer: pl.Trainer, step: int) -> Any:
    here("broadcast", step)
    return trainer.broadcast("of rank 0" if trainer.is_main else "", 0)


def main_first(here: Points, trainer: pl.Trainer, step: int, file: str) -> Any:
    with trainer.main_first():
        here("main_first", step)
        if trainer.is_main:
            Path(file).write_text("cached")
        return Path(file).read_text()


def write_weights(here: Points, trainer: pl.Trainer, step: int, file: str) -> Any:
    def dying(*args: Any) -> Any:
        write(*args)
        here("export", step)  # before the file has its name

    write, export.write_tensors = export.write_tensors, dying  # type: ignore[assignment]
    trainer.export(file)
    export.write_tensors = write  # type: ignore[assignment]
    return digest(load_file(file))


def train(here: Points, trainer: pl.Trainer, by_step: dict[int, Any], between: dict[int, Any]) -> list[Any]:
    """The results of operations in hooks, by step, and between epochs, by epoch."""
    results: list[Any] = []
    trainer.every(
        1,
        lambda record: (
            results.append(by_step[record.step](here, trainer, record.step)) if record.step in by_step else None
        ),
    )
    for epoch in trainer.epochs(3):
        for batch in epoch:
            trainer.backward(loss_of(trainer.model, batch))
            trainer.step()
        if epoch.number in between:
            results.append(between[epoch.number](here, trainer, trainer.position.step))
    return results


def test_operations_are_repeated_by_the_others(tmp_path: Path) -> None:
    def case(*deaths: Death, in_hooks: dict[int, Any], between: dict[int, Any]) -> Case:
        return Case(deaths, {"ema": 0.9}, train=partial(train, by_step=in_hooks, between=between))

    file, weights = str(tmp_path / "file"), str(tmp_path / "weights.safetensors")
    cases = [
        case(
            Death(8, "evaluate", 1),
            Death(0, "evaluate", 2),  # rank 0
            Death(7, "predict", 4),
            Death(6, "evaluate", 3),
            in_hooks={1: evaluate, 2: evaluate_average, 4: predict},
            between={0: evaluate},
        ),
        case(
            Death(1, "main_first", 2),  # rank 0
            Death(5, "gather", 4),
            Death(4, "predict", 6),
            in_hooks={2: partial(main_first, file=file), 4: gather, 5: reduce},
            between={1: predict},
        ),
        case(
            Death(2, "export", 1),  # rank 0 is the only one that writes
            in_hooks={1: partial(write_weights, file=weights), 4: broadcast},
            between={},
        ),
    ]
    found = launch(cases, 10)
    for case_, outcomes, num_left in zip(cases, found, (6, 3, 2), strict=True):
        check(outcomes, expected(case_), num_left)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "weights.safetensors"]
