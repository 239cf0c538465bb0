"""A worker dies while a checkpoint or a snapshot is written: it is written again, and a run can resume from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from elastic_runs import Case, Death, Points, check, expected, launch, loss_of

import paceline as pl
from paceline.checkpoint import writer
from paceline.checkpoint.folders import complete_steps, step_folder
from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.run_folder import MEMORY


def train(here: Points, trainer: pl.Trainer, num_epochs: int = 2) -> None:
    """Saves after the first epoch, beside what is scheduled."""
    with pytest.MonkeyPatch.context() as patch:
        _die_in(patch, here, "_leave_record", "written")  # by all but rank 0
        _die_in(patch, here, "make_visible", "publish")  # by rank 0
        trainer.register("witness", _Witness(here, trainer))
        for epoch in trainer.epochs(num_epochs):
            for batch in epoch:
                trainer.backward(loss_of(trainer.model, batch))
                trainer.step()
            if epoch.number == 0:
                trainer.save({"loss": 1.0})
        trainer.run.checkpointer.complete_writing()


def _die_in(patch: pytest.MonkeyPatch, here: Points, function: str, point: str) -> None:
    """Let workers die in a function of the writing thread, before it has any effect."""
    original: Callable[..., Any] = getattr(writer, function)

    def dying(partial_: Path, *args: Any, **keywords: Any) -> Any:
        step = int(partial_.name.split(".")[1].removeprefix("step-"))
        here(point if MEMORY not in partial_.parents else f"{point} snapshot", step)
        return original(partial_, *args, **keywords)

    patch.setattr(writer, function, dying)


class _Witness:
    """State of the user's in whose collection a worker dies."""

    def __init__(self, here: Points, trainer: pl.Trainer) -> None:
        self._here, self._trainer = here, trainer

    def state_dict(self) -> dict[str, Any]:
        self._here("state", self._trainer.position.step)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


def test_checkpoints(tmp_path: Path) -> None:
    def case(name: str, *deaths: Death, num_epochs: int = 2, **settings: Any) -> Case:
        checkpoints = pl.Checkpoints(tmp_path / name, **settings)
        return Case(deaths, {"checkpoints": checkpoints}, train=partial(train, num_epochs=num_epochs))

    scheduled = {"every_steps": 2, "keep_last": None}
    cases = [
        case("save", Death(8, "state", 3), every_steps=100),
        case("scheduled", Death(7, "written", 2), Death(0, "publish", 4), **scheduled),
        case("scheduled", num_epochs=3, **scheduled),  # goes on
        case("snapshots", Death(6, "written snapshot", 2), Death(1, "publish snapshot", 4), snapshot_every=1),
    ]
    found = launch(cases, 9)
    for number, (each, outcomes, num_left) in enumerate(zip(cases, found, (8, 6, 6, 4), strict=True)):
        fresh = pl.Checkpoints(tmp_path / f"expected-{number}", every_steps=100)
        want = expected(Case((), {"checkpoints": fresh}, train=each.train))
        if each is cases[2]:
            want["losses"] = want["losses"][6:]
        check(outcomes, want, num_left)
    steps = {name: complete_steps(tmp_path / name) for name in ("save", "scheduled", "snapshots")}
    # What was lost while it was written comes a step later, if the others have completed another one meanwhile.
    assert steps["save"] == [3, 6]
    assert [step for step in steps["scheduled"] if step not in (2, 3, 4, 5)] == [6, 8, 9]
    assert [step for step in steps["snapshots"] if step not in (3, 4, 5)] == [6]
    for name in ("save", "scheduled", "snapshots"):
        assert [path.name for path in (tmp_path / name).iterdir() if "partial" in path.name] == []
        for step in complete_steps(tmp_path / name):
            _load_all(Checkpoint(step_folder(tmp_path / name, step)))


def _load_all(checkpoint: Checkpoint) -> None:
    """Compares every file with its checksum."""
    for name in checkpoint.manifest.contents.components:
        for part in checkpoint.parts(name):
            checkpoint.load(name, part)
