"""When a run saves, and what asking costs in a step in which nothing is due."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from resumable import setup, step

import paceline as pl
from paceline.checkpoint.folders import complete_steps
from paceline.run.saving import checkpointer

PACKAGE = Path(pl.__file__).parent
ROOM = (PACKAGE / "checkpoint", PACKAGE / "run" / "saving")

# The settings; the steps that are saved in two epochs of 11 steps of 20 s.
SCHEDULES: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [22]),
    ({"final": False}, []),
    ({"every_steps": 8}, [8, 16, 22]),
    ({"every_steps": 11}, [11, 22]),
    ({"every_steps": 9, "final": False}, [9, 18]),
    ({"every_epochs": 1}, [11, 22]),
    ({"every_epochs": 2}, [22]),
    ({"every_minutes": 2, "final": False}, [7, 14, 21]),
    ({"every_minutes": 2.1, "final": False}, [8, 16]),
    ({"every_steps": 8, "every_minutes": 2, "final": False}, [7, 8, 15, 16]),
    ({"every_steps": 9, "every_epochs": 1, "final": False}, [9, 11, 18]),
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds = [0.0]
    monkeypatch.setattr(checkpointer, "monotonic", lambda: seconds[0])
    return seconds


def train(root: Path, clock: list[float], until: int | None = None, **settings: Any) -> None:
    def tick(_: pl.StepRecord) -> None:
        clock[0] += 20.0

    with setup(root, keep_last=None, **settings) as trainer:
        trainer.every(1, tick)
        for epoch in trainer.epochs(2, max_steps=until):
            for batch in epoch:
                step(trainer, batch)


@pytest.mark.parametrize(("settings", "expected"), SCHEDULES)
def test_when_a_run_saves(tmp_path: Path, clock: list[float], settings: dict[str, Any], expected: list[int]) -> None:
    train(tmp_path, clock, **settings)
    assert complete_steps(tmp_path) == expected


def test_a_resumed_run_saves_where_it_would_have(tmp_path: Path, clock: list[float]) -> None:
    train(tmp_path, clock, until=5, every_steps=4)
    assert complete_steps(tmp_path) == [4, 5]
    train(tmp_path, clock, every_steps=4, every_epochs=1, final=False)
    assert complete_steps(tmp_path) == [4, 5, 8, 11, 12, 16, 20]


def test_a_run_saves_in_time_however_often_its_workers_change(tmp_path: Path, clock: list[float]) -> None:
    with setup(tmp_path, keep_last=None, every_minutes=2, final=False) as trainer:

        def tick(record: pl.StepRecord) -> None:
            clock[0] += 20.0
            if record.step % 3 == 0:
                trainer.run.checkpointer.reconnect(trainer.run.loop)

        trainer.every(1, tick)
        for epoch in trainer.epochs(2):
            for batch in epoch:
                step(trainer, batch)
    assert complete_steps(tmp_path) == [7, 14, 21]


def test_a_run_whose_workers_change_needs_no_old_checkpoint(tmp_path: Path) -> None:
    with setup(tmp_path, keep_last=None, every_steps=4, final=False) as trainer:

        def damage(_: pl.StepRecord) -> None:
            trainer.run.checkpointer.complete_writing()
            (tmp_path / "step-00000008" / "manifest.json").write_text("{}")
            trainer.run.checkpointer.reconnect(trainer.run.loop)

        trainer.every(9, damage)
        for batch in next(trainer.epochs(1)):
            step(trainer, batch)
    assert complete_steps(tmp_path) == [4, 8, 9]  # step 8 cannot be read, so the next save is due


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_step_in_which_nothing_is_due_enters_one_function_at_most(tmp_path: Path, has_folder: bool) -> None:
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and any(Path(frame.f_code.co_filename).is_relative_to(folder) for folder in ROOM):
            entered.add(frame.f_code.co_qualname)

    with setup(tmp_path if has_folder else None) as trainer:
        for batch in next(trainer.epochs(1)):
            sys.setprofile(None)
            if trainer.position.step == 9:
                break
            if trainer.position.step in (1, 8):  # in the first ones the run is resumed and memory is allocated
                entered.clear()
                if trainer.run.checkpointer._writers:
                    trainer.run.checkpointer._writers[0].wait()
                sys.setprofile(note if trainer.position.step == 8 else None)
            step(trainer, batch)
        sys.setprofile(None)
    assert entered == ({"Checkpointer.decide"} if has_folder else set())
