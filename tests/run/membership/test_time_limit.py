"""Only a micro-batch has a time limit: a slow disk or slow data must not end workers as stalled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_runs import Case, Points, Samples, loop, setup
from waiting import wait_until

import paceline as pl
from paceline.checkpoint import writer
from paceline.checkpoint.folders import complete_steps
from paceline.checkpoint.manifest import MANIFEST_NAME
from paceline.run.membership.board import Activity
from paceline.run.membership.member import Membership


def activity() -> Activity:
    membership = Membership.from_environment()
    assert membership is not None
    return membership.row.activity


class Observed(Samples):
    """Notes what its worker is doing, for the agent, while samples are read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Activity] = set()

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.found.add(activity())
        return super().__getitem__(number)


def train(folder: Path) -> set[Activity]:
    """The second save waits for the first one, which is written as soon as that wait has no limit."""
    write_file = writer.write_file

    def slow(path: Path, *args: Any, **keywords: Any) -> Any:
        if path.name == MANIFEST_NAME and "step-00000001" in path.parent.name:
            wait_until(lambda: activity() is Activity.ELSEWHERE)
        return write_file(path, *args, **keywords)

    data = Observed()
    settings = {"checkpoints": pl.Checkpoints(folder, every_steps=1), "readers": 0}
    case = Case((), settings, data=lambda: data)
    with pytest.MonkeyPatch.context() as patch, setup(case) as trainer:  # without hooks, which have no limit either
        patch.setattr(writer, "write_file", slow)
        loop(Points(()), trainer, 1)
    return data.found


def test_reading_and_saving_have_no_limit(tmp_path: Path) -> None:
    assert pl.launch(train, 1, args=(tmp_path,), min_workers=1) == {Activity.ELSEWHERE}
    assert complete_steps(tmp_path) == [1, 2, 3]
