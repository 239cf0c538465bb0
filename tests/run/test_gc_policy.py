"""Full garbage collections during a run: when they come, what they free, and that the user's settings return."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import pytest
import torch
from grouping import grouped
from models import mlp, vectors
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl
from paceline.run.step import gc_policy
from paceline.run.step.gc_policy import FROZEN_BY_PYTHON, POSTPONED, GcPolicy

BATCH = 2
EVERY = 10
NUM_STEPS = 35
# Fills the old generation in a short test.
EAGER = (500, 5, 1)


@pytest.fixture(autouse=True)
def no_other_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other tests may have left a trainer open."""
    monkeypatch.setattr(gc_policy, "EVERY_STEPS", EVERY)
    monkeypatch.setattr(GcPolicy, "_inside", [])
    monkeypatch.setattr(GcPolicy, "_frozen_by", [])
    gc.unfreeze()
    yield
    gc.unfreeze()


def trainer_over(num_steps: int = NUM_STEPS, **settings: Any) -> pl.Trainer:
    data = vectors(num_steps * BATCH)
    return pl.Trainer.setup(
        mlp, lambda p: torch.optim.SGD(p, lr=0.01), data=data, global_batch=BATCH, **grouped(**settings)
    )


def take_step(trainer: pl.Trainer, batch: Any) -> None:
    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
    trainer.step()


def state() -> tuple[bool, tuple[int, int, int], bool]:
    return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > FROZEN_BY_PYTHON


@contextmanager
def thresholds(*values: int) -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*values)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def full_collections(place: Callable[[], Any]) -> Iterator[list[Any]]:
    """The values of `place()` when full collections began."""
    places: list[Any] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            places.append(place())

    gc.callbacks.append(note)
    try:
        yield places
    finally:
        gc.callbacks.remove(note)


def where_collected(garbage_collection: str, **settings: Any) -> list[tuple[int, bool]]:
    """The step of each full collection, and whether it came inside a step."""
    kept, is_inside = [], False
    with (
        thresholds(*EAGER),
        trainer_over(garbage_collection=garbage_collection, **settings) as trainer,
        full_collections(lambda: (trainer.position.step, is_inside)) as places,
    ):
        for epoch in trainer.epochs(1):
            for batch in epoch:
                is_inside = True
                kept.append([[i] for i in range(2500)])
                take_step(trainer, batch)
                is_inside = False
        return [place for place in places if place[0] < NUM_STEPS]


def test_full_collections_come_between_steps_only() -> None:
    assert where_collected("between steps") == [(10, False), (20, False), (30, False)]


def test_as_usual_they_come_inside_steps() -> None:
    assert any(is_inside for _, is_inside in where_collected("as usual"))


def test_workers_collect_between_the_same_steps(pool: WorkerPool) -> None:
    def work() -> list[tuple[int, bool]]:
        with pytest.MonkeyPatch.context() as patch:  # the pool's workers are shared
            patch.setattr(gc_policy, "EVERY_STEPS", EVERY)
            return where_collected("between steps", micro_batch=1, shares="equal")

    # A worker in which no object became old has nothing to collect.
    for places in pool.run(work, 2):
        assert places
        assert set(places) <= {(10, False), (20, False), (30, False)}


def test_nothing_is_collected_if_no_object_became_old() -> None:
    with (
        thresholds(100_000_000, 10, 10),
        trainer_over() as trainer,
        full_collections(lambda: trainer.position.step) as steps,
    ):
        run_all(trainer)
        assert [step for step in steps if step < NUM_STEPS] == []


class Node:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.me = self


def test_cycles_that_steps_leave_are_freed() -> None:
    nodes: WeakSet[Node] = WeakSet()
    most, per_step = 0, 100
    recent: list[Node] = []
    with thresholds(50, 1, 10), trainer_over(8 * EVERY) as trainer:  # objects become old soon
        for epoch in trainer.epochs(1):
            for batch in epoch:
                take_step(trainer, batch)
                recent = [Node() for _ in range(per_step)]
                nodes.update(recent)
                most = max(most, len(nodes))
    assert most <= (EVERY + 1) * per_step


def run_all(trainer: pl.Trainer) -> None:
    for epoch in trainer.epochs(1):
        for batch in epoch:
            take_step(trainer, batch)


def leave_by_break(trainer: pl.Trainer) -> None:
    for epoch in trainer.epochs(1):
        for batch in epoch:
            take_step(trainer, batch)
            break


def leave_by_an_error(trainer: pl.Trainer) -> None:
    for epoch in trainer.epochs(1):
        for batch in epoch:
            take_step(trainer, batch)
            raise RuntimeError("of the user")


LEFT_OPEN: list[Any] = []


def leave_the_iterator_open(trainer: pl.Trainer) -> None:
    LEFT_OPEN.append(batches := iter(next(trainer.epochs(1))))
    take_step(trainer, next(batches))


@pytest.mark.parametrize("leave", [run_all, leave_by_break, leave_by_an_error, leave_the_iterator_open])
def test_the_users_settings_return_however_the_run_ends(leave: Callable[[pl.Trainer], None]) -> None:
    with thresholds(600, 9, 8):
        before, during = state(), []
        expected = pytest.raises(RuntimeError, match="of the user") if leave is leave_by_an_error else nullcontext()
        with expected, trainer_over() as trainer:
            trainer.every(1, lambda _: during.append(state()))
            leave(trainer)
        assert state() == before
        LEFT_OPEN.clear()
        assert state() == before
    assert during[0] == (True, (600, 9, 8 * POSTPONED), True)


def test_between_epochs_the_thresholds_are_the_usual_ones() -> None:
    usual = gc.get_threshold()
    with trainer_over(3) as trainer:
        for epoch in trainer.epochs(3):
            for batch in epoch:
                take_step(trainer, batch)
                assert gc.get_threshold() != usual
            assert gc.get_threshold() == usual


def test_a_disabled_collector_stays_disabled_and_is_not_called() -> None:
    gc.disable()
    try:
        before = state()
        with trainer_over() as trainer, full_collections(lambda: trainer.position.step) as steps:
            run_all(trainer)
            assert state() == before
        assert not steps
    finally:
        gc.enable()


def test_objects_that_the_program_froze_stay_frozen() -> None:
    gc.collect()
    gc.freeze()
    try:
        num_frozen = gc.get_freeze_count()
        with trainer_over() as trainer:
            run_all(trainer)
        # A frozen object may still be freed when its last reference goes.
        assert abs(gc.get_freeze_count() - num_frozen) < FROZEN_BY_PYTHON
    finally:
        gc.unfreeze()


def test_thresholds_that_the_user_sets_during_the_run_are_kept() -> None:
    with thresholds(*gc.get_threshold()):
        with trainer_over() as trainer:
            trainer.every(NUM_STEPS - 2, lambda _: gc.set_threshold(777, 7, 7))
            run_all(trainer)
        assert gc.get_threshold() == (777, 7, 7)


def test_the_last_of_two_trainers_restores_the_settings() -> None:
    before = state()
    with trainer_over() as outer:
        for epoch in outer.epochs(1):
            for batch in epoch:
                take_step(outer, batch)
                if outer.position.step == 5:
                    during = state()
                    with trainer_over(3) as inner:
                        run_all(inner)
                    assert state() == during != before
    assert state() == before


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="garbage_collection='never' is unknown: choose 'between steps' or 'as usual'"):
        trainer_over(4, garbage_collection="never")
