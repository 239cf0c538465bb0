"""Survivors that differ by a step, deaths in hooks, and a state that arrives damaged."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_runs import STEPS_PER_EPOCH, Case, Death, Points, Stream, check, expected, launch, loop, loss_of

import paceline as pl
from paceline.comm.single import SingleCommunicator
from paceline.core.errors import CommunicationError, MisuseError
from paceline.core.message import encode
from paceline.core.world import World
from paceline.run.membership import rejoining

BEHIND, DYING = 2, 1


def interrupt_exchange(trainer: pl.Trainer, step: int) -> None:
    """An exchange of this step fails here, as if the loss had been noticed before it was complete."""
    communicator: Any = trainer.run.communicator
    original, has_failed = communicator.complete, []

    def complete() -> None:
        original()
        if trainer.position.step == step and not has_failed:
            has_failed.append(True)
            raise CommunicationError("a worker was lost during the exchange")

    communicator.complete = complete


def train(here: Points, trainer: pl.Trainer, folder: str) -> None:
    """In the third step one worker dies when others have completed it, and one that has not is left."""
    slot = here.own[0]

    def after_exchange(_: Any) -> None:
        if here.will_die("update", trainer.position.step):
            while len(list(Path(folder).iterdir())) < 2:  # two of four have completed the step
                time.sleep(0.001)
            here("update", trainer.position.step)

    if slot == BEHIND:
        interrupt_exchange(trainer, 2)
    trainer.on_gradients(after_exchange)
    trainer.every(3, lambda record: (Path(folder) / f"{slot}").touch() if record.step == 3 else None)
    completed = []
    for epoch in trainer.epochs(2):
        for batch in epoch:
            trainer.backward(loss_of(trainer.model, batch))
            if (record := trainer.step()) is not None:
                completed.append(record.step)
    # None for the step that was abandoned, and one record for each that was completed, here or by the others.
    assert completed == [1, 2, 3, 4, 5, 6], (slot, completed)


def test_a_survivor_takes_over_the_step_that_the_others_have_completed(tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    cases = [
        Case([Death(DYING, "update", 2)], train=partial(train, folder=str(tmp_path / "marks"))),
        Case([Death(3, "hook", 2)]),  # the others may have run theirs
    ]
    behind, in_hook = launch(cases, 4)
    check(behind, expected(Case((), cases[0].settings)), 3)
    check(in_hook, expected(cases[1]), 2)
    assert len(behind[0]["events"]) == 1


def train_stream(here: Points, trainer: pl.Trainer, folder: str) -> list[Any]:
    """Rank 0 dies when it has told the next rank, and not the one after it, that the stream's epoch is over."""
    feed: Any = trainer.run.loop._feed
    if here.will_die("counts", STEPS_PER_EPOCH):
        original = feed._link.send

        def send(tensor: torch.Tensor, to: int) -> None:
            if to == 2 and trainer.position.step == STEPS_PER_EPOCH:
                while not list(Path(folder).iterdir()):
                    time.sleep(0.001)
                here("counts", STEPS_PER_EPOCH)
            original(tensor, to)

        feed._link.send = send
    ended = []

    def note_end(epoch: int) -> None:
        (Path(folder) / f"{here.own[0]}").touch()
        ended.append((epoch, trainer.gather(epoch)[0]))

    trainer.every_epoch(1, note_end)
    loop(here, trainer)
    return ended


def test_a_survivor_ends_the_epoch_that_another_has_ended(tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    train = partial(train_stream, folder=str(tmp_path / "marks"))
    case = Case([Death(0, "counts", STEPS_PER_EPOCH)], {"shuffle_buffer": 20}, Stream, train)
    [outcomes] = launch([case], 3)
    check(outcomes, expected(case), 2)


def test_a_state_that_arrives_damaged_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(values: Any, *_: Any) -> Any:
        message, digest = values
        message[-1] += 1
        return message, digest

    message = encode({"weight": torch.ones(4)}, "state")
    alone: Any = SingleCommunicator(World())
    assert rejoining._shared(message.clone(), 0, alone)["weight"].tolist() == [1.0] * 4
    monkeypatch.setattr(rejoining.collect, "broadcast", damage)
    with pytest.raises(MisuseError, match=r"rank 0 arrived on rank 0 with digest \w{12} instead of \w{12}: check"):
        rejoining._shared(message.clone(), 0, alone)
