"""Replacements join, workers leave, stand still or fail: with one launch for several of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_runs import (
    NUM_SAMPLES,
    Case,
    Death,
    Points,
    check,
    expected,
    launch,
    loop,
    loss_of,
    vectors,
    wait_for_members,
)
from torch.nn import functional
from waiting import wait_until

import paceline as pl
from paceline.errors import WorkerError
from paceline.run.membership.generation import Member
from paceline.run.membership.member import Membership


def train(here: Points, trainer: pl.Trainer, waits: Mapping[int, int], leaving: int = -1) -> None:
    """waits: by step, for how many members to wait in its hook. leaving: a slot that is asked to leave at step 8."""

    def after_step(record: pl.StepRecord) -> None:
        if record.step == 8 and leaving >= 0 and trainer.is_main and (own := Membership.from_environment()):
            own.ask_to_leave(Member(0, leaving))
        if record.step in waits:
            wait_for_members(waits[record.step])

    trainer.every(1, after_step)
    loop(here, trainer, 4)


def changes(outcome: Mapping[str, Any]) -> list[tuple[int, int, list[int], list[int]]]:
    return [tuple(event[name] for name in ("generation", "size", "left", "joined")) for event in outcome["events"]]


def test_replacements_join(capfd: pytest.CaptureFixture[str]) -> None:
    """One dies during set-up, so that all start again; one in a step; its replacement while it joins; then rank 0."""
    deaths = [
        Death(2, "set-up", 0),
        Death(1, step=2, restart=1),
        Death(1, "load", 0, start=1, restart=1),
        Death(0, step=9, how="error", restart=1),
    ]
    case = Case(deaths, {"shares": "measured"}, train=partial(train, waits={3: 3, 6: 3}))
    [outcomes] = launch([case], 3, max_restarts=2)
    check(outcomes, expected(case), 2)
    assert [outcome["member"] for outcome in outcomes] == [(2, 0, 1), (1, 2, 1)]
    survivor, newcomer = outcomes
    assert changes(survivor) == [(1, 2, [1], []), (3, 2, [], []), (4, 3, [], [2]), (5, 2, [0], [])]
    assert changes(newcomer)[-1] == (5, 2, [0], [])
    first, *_, last = survivor["events"]
    assert "rank 1 was killed by SIGKILL" in first["reason"]
    assert "CUDA error: an illegal memory access" in last["reason"]
    assert all(0 <= event["seconds"] < 60 for event in survivor["events"])
    errors = capfd.readouterr().err
    assert "paceline: restart 1: rank 2 was killed by SIGKILL" in errors
    assert "rank 0 failed: AcceleratorError: CUDA error: an illegal memory access was encountered: 2 workers" in errors


def count_work(here: Points, trainer: pl.Trainer, folder: str) -> list[tuple[int, int]]:
    """Train until a replacement has taken part. Every worker notes the micro-batches that it computes.

    The replacement sets itself up only when the others have completed three more steps. They go on until it is in.
    """
    work = (Path(folder) / f"work-{'-'.join(map(str, here.own))}").open("w", buffering=1)
    marks = Path(folder) / "marks"

    def after_step(record: pl.StepRecord) -> None:
        (marks / f"{record.step}").touch()
        if record.step == 9:  # by then it may still be in its set-up
            wait_for_members(3)

    trainer.every(1, after_step)
    for epoch in trainer.epochs(4):
        for batch in epoch:
            here("micro-batch", trainer.position.step)
            trainer.backward(loss_of(trainer.model, batch))
            work.write(f"{trainer.position.step} {batch.x.sum().item().hex()}\n")
            trainer.step()


def test_a_newcomer_costs_no_step(tmp_path: Path) -> None:
    """The others train while it sets itself up, and repeat nothing when it joins: only the death costs a step."""
    (tmp_path / "marks").mkdir()

    def data() -> Any:
        if Membership.from_environment() and Points([]).own[1] == 1:
            wait_until(lambda: (tmp_path / "marks" / "6").exists())  # the step of the death is the third
        return vectors(NUM_SAMPLES)

    case = Case([Death(1, step=2)], data=data, train=partial(count_work, folder=str(tmp_path)))
    [outcomes] = launch([case], 3, max_restarts=1)
    assert [outcome["member"] for outcome in outcomes] == [(0, 0, 0), (2, 0, 0), (1, 1, 0)]
    assert changes(outcomes[0])[1:] == [(2, 3, [], [2])]
    work = [line for path in tmp_path.glob("work-*") for line in path.read_text().splitlines()]
    times = Counter(work)
    assert {line.split()[0] for line, count in times.items() if count > 1} <= {"2"}, "only the abandoned step"
    by_newcomer = {int(line.split()[0]) for line in (tmp_path / "work-1-1-0").read_text().splitlines()}
    assert min(by_newcomer) >= 6
    assert by_newcomer == set(range(min(by_newcomer), 12)), "from then on it works in every step"
    assert len(times) == sum(10 if step % 3 < 2 else 8 for step in range(12)), "every micro-batch, by whomever"


def test_workers_stand_still_and_leave(capfd: pytest.CaptureFixture[str]) -> None:
    deaths = [Death(4, step=2, how="stall"), Death(3, step=4, how="stop"), Death(0, step=6, how="exit")]
    case = Case(deaths, train=partial(train, waits={8: 2}, leaving=2))
    [outcomes] = launch([case], 6, stall_s=5.0)
    check(outcomes, expected(case), 2)
    assert [outcome["member"][0] for outcome in outcomes] == [1, 5]
    reasons = [event["reason"] for event in outcomes[0]["events"]]
    assert len(reasons) == 4
    assert reasons[0].startswith("rank 4 stalled for ")
    assert f'at File "{__file__.replace("test_comings_and_goings", "elastic_runs")}", line ' in reasons[0]
    assert ", in die, and was ended" in reasons[0]
    assert reasons[1].startswith("rank 3 was stopped for ")
    assert reasons[2:] == ["rank 0 exited with code 7 before its work was done", "rank 2 was asked to leave"]
    assert changes(outcomes[0])[-1] == (4, 2, [1], [])
    errors = capfd.readouterr().err
    assert "rank 2 left: rank 2 was asked to leave: 2 workers continue" in errors


def test_an_exception_of_the_users_ends_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    def train(here: Points, trainer: pl.Trainer) -> None:
        trainer.every(2, lambda _: [].pop() if here.own[0] == 1 else None)
        loop(here, trainer)

    with pytest.raises(WorkerError, match="rank 1 failed: IndexError: pop from empty list") as caught:
        launch([Case((), train=train)], 2, max_restarts=3)
    assert "lambda _: [].pop()" in caught.value.traceback_text
    assert "restart" not in capfd.readouterr().err


@pytest.mark.soak
def test_a_slot_that_dies_again_at_the_same_step_ends_the_run() -> None:
    deaths = [Death(1, step=0), Death(1, "set-up", 0, start=1)]
    with pytest.raises(WorkerError, match="its slot died 2 times at step 1: the run ends, as it would recur"):
        launch([Case(deaths, train=partial(train, waits={1: 2}))], 2, max_restarts=1)


def test_rank_0_leaves_and_its_process_goes_on(tmp_path: Path) -> None:
    """Its logger may take long to upload. The others own the folder of checkpoints at once."""

    def train(folder: Path) -> int:
        x = torch.arange(96.0).view(24, 4) / 96
        with pl.Trainer.setup(
            lambda: torch.nn.Linear(4, 1),
            torch.optim.SGD,
            data=(x, x[:, :1]),
            global_batch=4,
            micro_batch=2,
            checkpoints=pl.Checkpoints(folder / "checkpoints", every_steps=2),
        ) as trainer:

            def after_step(record: pl.StepRecord) -> None:
                if record.step == 3:
                    if trainer.is_main:
                        trainer.request_leave(0)
                    wait_for_members(1)
                if record.step == 6:
                    (folder / "gone-on").touch()

            trainer.every(1, after_step)
            try:
                for epoch in trainer.epochs(max_steps=8):
                    for batch in epoch:
                        trainer.backward(functional.mse_loss(trainer.model(batch.x), batch.y))
                        trainer.step()
            except SystemExit:
                wait_until((folder / "gone-on").exists)
                raise
            return trainer.world.size

    assert pl.launch(train, 2, args=(tmp_path,), min_workers=1) == 1
