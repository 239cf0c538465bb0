"""A worker dies while all workers do something together outside of the steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_runs import Case, Death, Points, check, digest, expected, launch, loop, loss_of, vectors
from safetensors.torch import load_file
from torch import nn

import paceline as pl
from paceline.errors import WorkerError
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


def reduce_dying_inside(here: Points, trainer: pl.Trainer, step: int) -> Any:
    with dying_in_exchange(here, trainer, "in reduce", step, call=2):
        return trainer.reduce(float(step), "max")


def broadcast_dying_inside(here: Points, trainer: pl.Trainer, step: int, source: int = 0) -> Any:
    """The workers' own values differ; their slots do not change with the ranks."""
    with dying_in_exchange(here, trainer, "in broadcast", step):
        return trainer.broadcast(f"of slot {here.own[0]}", min(source, trainer.world.size - 1)).startswith("of slot")


@contextmanager
def dying_in_exchange(here: Points, trainer: pl.Trainer, point: str, step: int, call: int = 1) -> Iterator[None]:
    """A worker dies in its call-th exchange, which it has begun."""
    communicator: Any = trainer.run.communicator
    original, calls = communicator.broadcast, count(1)

    def dying(*args: Any) -> Any:
        pending = original(*args)
        if next(calls) == call:
            here(point, step)
        return pending

    communicator.broadcast = dying
    try:
        yield
    finally:
        communicator.broadcast = original


def save_pretrained(here: Points, trainer: pl.Trainer, step: int, folder: str) -> Any:
    def save(target: str) -> None:
        Path(target).mkdir(exist_ok=True)
        (Path(target) / "config").write_text("complete")
        here("save_pretrained", step)
        (Path(target) / "weights").write_text(digest(trainer.model.state_dict()))

    trainer.model.save_pretrained = save
    trainer.save_pretrained(folder)
    return [(path.name, path.read_text()) for path in sorted(Path(folder).iterdir())]


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


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_workers_die_inside_of_calls(backend: str | None, tmp_path: Path) -> None:
    """Over shared memory and over Gloo: in the middle of an exchange, and while rank 0 writes."""
    folder = str(tmp_path / "saved")
    in_hooks = {
        1: reduce_dying_inside,
        2: broadcast_dying_inside,  # by its source
        3: partial(save_pretrained, folder=folder),
        4: partial(broadcast_dying_inside, source=1),
        5: gather,
        6: evaluate,
    }
    deaths = [
        Death(3, "in reduce", 1),
        Death(0, "in broadcast", 2),
        Death(1, "save_pretrained", 3),  # rank 0 by then
        Death(5, "in broadcast", 4),
        Death(4, "evaluate", 6),
    ]
    case = Case(deaths, {"backend": backend}, train=partial(train, by_step=in_hooks, between={}))
    [outcomes] = launch([case], 7)
    check(outcomes, expected(case), 2)
    assert [outcome["member"][0] for outcome in outcomes] == [2, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("has_values", [True, False])
def test_a_broadcast_follows_its_source(has_values: bool) -> None:
    """Rank 0 dies in a broadcast of rank 2, which is rank 1 then; and rank 0, as the source, in the next one."""

    def train(here: Points, trainer: pl.Trainer) -> Any:
        results = []

        def after_step(record: pl.StepRecord) -> None:
            if record.step in (1, 2):
                slot = here.own[0]
                value = slot if has_values or trainer.world.rank == (2 if record.step == 1 else 0) else None
                with dying_in_exchange(here, trainer, "in broadcast", record.step):
                    results.append(trainer.broadcast(value, 2 if record.step == 1 else 0))

        trainer.every(1, after_step)
        loop(here, trainer)
        return results

    deaths = [Death(0, "in broadcast", 1), Death(1, "in broadcast", 2)]
    if not has_values:
        with pytest.raises(WorkerError, match="rank 0 was lost while its value was broadcast, and no other worker has"):
            launch([Case(deaths, train=train)], 4)
        return
    [outcomes] = launch([Case(deaths, train=train)], 4)
    assert [outcome["results"] for outcome in outcomes] == [[2, 2]] * 2
