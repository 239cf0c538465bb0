"""Deaths where the optimizer's state is divided among the workers and held twice: nothing is lost, to the bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from elastic_runs import NUM_SAMPLES, Case, Death, Points, check, expected, launch, loop, wait_for_members
from models import digest, vectors

import paceline as pl
from paceline.core.errors import CommunicationError
from paceline.plan import sharding

DIVIDED = {"shard": "optimizer", "redundancy": 2, "max_grad_norm": 0.1, "ema": 0.9}


class Point(NamedTuple):
    """Where the third step, or what follows it, is disturbed.

    place: a method of the update, or "divide_again", when all pieces were handed over after a loss. dying: slots that
    are killed when they call it. failing: slots on which the loss is noticed in it: when it is complete, or before.
    """

    place: str
    dying: tuple[int, ...] = ()
    failing: tuple[int, ...] = ()
    is_before: bool = False


def small_pieces() -> Any:
    """The data; in each process, parameters are cut into pieces of 64 elements."""
    sharding.SEGMENT_NUMEL = 64
    return vectors(NUM_SAMPLES)


@pytest.fixture(autouse=True)
def usual_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "SEGMENT_NUMEL", sharding.SEGMENT_NUMEL)


def train(here: Points, trainer: pl.Trainer, points: Sequence[Point] = ()) -> str:
    """A digest of the averaged weights."""
    run, slot = trainer.run, here.own[0]
    update: Any = run.loop.update

    def disturb(point: Point, original: Callable[..., Any]) -> Callable[..., Any]:
        has_happened: list[bool] = []

        def disturbed(*args: Any) -> Any:
            is_now = trainer.position.step >= 2 and not has_happened
            if is_now and slot in point.dying:
                os.kill(os.getpid(), signal.SIGKILL)
            result = None if is_now and slot in point.failing and point.is_before else original(*args)
            if is_now and slot in point.failing:
                has_happened.append(True)
                run.communicator.interrupt(CommunicationError("a worker was lost"))
            return result

        return disturbed

    is_first = here.own[1:] == (0, 0)  # neither a replacement nor restarted
    for point in points if run.rejoining is not None and is_first else ():
        home = update._shards if point.place == "divide_again" else update
        setattr(home, point.place, disturb(point, getattr(home, point.place)))
    loop(here, trainer)
    with trainer.ema_weights():
        return digest(trainer.model.state_dict())


def case(*points: Point, deaths: Sequence[Death] = (), **settings: Any) -> Case:
    return Case(deaths, {**DIVIDED, **settings}, data=small_pieces, train=partial(train, points=points))


def test_deaths_in_any_part_of_a_step() -> None:
    cases = [
        case(deaths=[Death(3, step=2)]),
        case(Point("_norm", dying=(2,))),  # begun again
        case(Point("_wait_for_all", dying=(1,))),  # all others can complete it
    ]
    outcomes = launch(cases, 4)
    for number, (each, found) in enumerate(zip(cases, outcomes, strict=True)):
        check(found, expected(each), 3 - number)
        assert len(found[0]["events"]) == 1


@pytest.mark.parametrize("failing", [(), (0,), (0, 2, 3)])
def test_a_step_that_some_have_updated_is_completed_by_all(failing: tuple[int, ...]) -> None:
    """One dies when it has updated its pieces. Some of the others do not know whether all were ready."""
    each = case(Point("share", dying=(1,)), Point("_wait_for_all", failing=failing))
    [outcomes] = launch([each], 4)
    check(outcomes, expected(each), 3)
    assert len(outcomes[0]["events"]) == 1


def test_another_death_while_pieces_are_handed_over() -> None:
    """Some have their new pieces then, others not yet."""
    interrupted = Point("divide_again", dying=(2,), failing=(1,), is_before=True)
    each = case(Point("_norm", dying=(3,)), interrupted, redundancy=3)
    [outcomes] = launch([each], 5)
    check(outcomes, expected(each), 3)


@pytest.mark.parametrize(
    "settings", [{"shard": "gradients"}, {"precision": "fp16", "max_grad_norm": None, "exact": False}]
)
def test_other_settings(settings: dict[str, Any]) -> None:
    each = case(Point("share", dying=(1,)), **settings)
    [outcomes] = launch([each], 3)
    if each.settings.get("exact", True):
        check(outcomes, expected(each), 2)
    else:
        assert [outcome["position"] for outcome in outcomes] == [6, 6]
        assert len({outcome["digest"] for outcome in outcomes}) == 1


def joined_by_another(here: Points, trainer: pl.Trainer) -> str:
    trainer.every(1, lambda record: wait_for_members(3) if record.step == 4 else None)
    return train(here, trainer)


def test_a_replacement_gets_its_pieces() -> None:
    each = case(deaths=[Death(1, step=2)])
    joined = Case(each.deaths, each.settings, data=small_pieces, train=joined_by_another)
    [outcomes] = launch([joined], 3, max_restarts=1)
    check(outcomes, expected(each), 3)


def test_without_any_holder_all_restart_from_a_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = {"checkpoints": pl.Checkpoints(tmp_path / "run", every_steps=1)}
    each = case(Point("_norm", dying=(0, 1)))
    saved = Case([], {**each.settings, **folder}, data=small_pieces, train=each.train)
    [outcomes] = launch([saved], 3, max_restarts=1)
    want = expected(each)
    assert [outcome["digest"] for outcome in outcomes] == [want["digest"]] * len(outcomes)
    assert "restart 1" in capfd.readouterr().err
