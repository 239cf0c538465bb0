"""Python's garbage collector: when it comes during a run, what it leaves, and that the user's settings come back."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from paceline.run.step import gc_policy as collector
from paceline.run.step.gc_policy import EVERY_STEPS, FROZEN_BY_PYTHON, WARM_UP_STEPS, CollectBetweenSteps

BATCH = 2
NUM_STEPS = 2 * EVERY_STEPS + 20
GRID = [WARM_UP_STEPS, EVERY_STEPS, 2 * EVERY_STEPS]
# Few enough young objects to fill the old generation in a short test, and still none too many for a step.
EAGER = (500, 5, 1)


@pytest.fixture(autouse=True)
def no_run_of_another_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Examples of other tests may have left a trainer open, as a script may that ends soon."""
    monkeypatch.setattr(collector, "_PROCESS", collector._Process())
    gc.unfreeze()
    yield
    gc.unfreeze()


def trainer_over(num_steps: int, **settings: Any) -> pl.Trainer:
    data = vectors(num_steps * BATCH)
    return pl.Trainer.setup(
        mlp, lambda p: torch.optim.SGD(p, lr=0.01), data=data, global_batch=BATCH, **grouped(**settings)
    )


def take_step(trainer: pl.Trainer, batch: Any) -> None:
    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
    trainer.step()


def is_anything_frozen() -> bool:
    return gc.get_freeze_count() > FROZEN_BY_PYTHON


def state() -> tuple[bool, tuple[int, int, int], bool]:
    return gc.isenabled(), gc.get_threshold(), is_anything_frozen()


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
    """What `place()` said whenever a full collection began."""
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
    """The step of each full collection, and whether it came in the middle of one, where objects pile up."""
    kept, is_inside = [], False
    with (
        thresholds(*EAGER),
        trainer_over(NUM_STEPS, garbage_collection=garbage_collection, **settings) as trainer,
        full_collections(lambda: (trainer.position.step, is_inside)) as places,
    ):
        for epoch in trainer.epochs(1):
            for batch in epoch:
                is_inside = True
                if trainer.position.step >= WARM_UP_STEPS:
                    kept.append([[i] for i in range(2500)])
                take_step(trainer, batch)
                is_inside = False
        return [place for place in places if place[0] < NUM_STEPS]


def test_after_the_warm_up_full_collections_come_between_steps_only() -> None:
    assert [place for place in where_collected("between steps") if place[0] >= WARM_UP_STEPS] == [
        (step, False) for step in GRID
    ]


def test_as_usual_they_come_in_the_middle_of_steps() -> None:
    assert any(is_inside for _, is_inside in where_collected("as usual"))


def test_two_workers_collect_at_the_same_steps(pool: WorkerPool) -> None:
    def work() -> list[int]:
        return [step for step, _ in where_collected("between steps", micro_batch=1) if step >= WARM_UP_STEPS]

    assert pool.run(work, 2) == [GRID, GRID]


def test_where_nothing_became_old_nothing_is_collected_after_the_warm_up() -> None:
    with (
        thresholds(100_000_000, 10, 10),
        trainer_over(NUM_STEPS) as trainer,
        full_collections(lambda: trainer.position.step) as steps,
    ):
        leave_at_the_end(trainer)
        assert [step for step in steps if step < NUM_STEPS] == [WARM_UP_STEPS]


class Node:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.me = self


def test_cycles_that_a_program_makes_in_its_steps_are_freed() -> None:
    nodes: WeakSet[Node] = WeakSet()
    recent: deque[Node] = deque(maxlen=300)
    most = 0
    per_step = 100
    # They soon become old here, so that Python itself does not find them young.
    with thresholds(50, 1, 10), trainer_over(8 * EVERY_STEPS) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                take_step(trainer, batch)
                for _ in range(per_step):
                    nodes.add(node := Node())
                    recent.append(node)
                most = max(most, len(nodes))
    # Those of the steps since the last collection, and those that were recent when one came.
    assert most <= EVERY_STEPS * per_step + (8 + 1) * 300


def test_what_was_set_aside_is_looked_at_again_when_it_has_doubled() -> None:
    size = 50_000
    nodes: WeakSet[Node] = WeakSet()
    run = CollectBetweenSteps()
    run.begin_epoch(0)
    gc.collect()
    num_alive = sys.getallocatedblocks()
    most = 0
    for number in range(2 * num_alive // size + 4):
        kept = [Node() for _ in range(size)]
        nodes.update(kept[::1000])
        gc.collect(1)  # they become old
        run.between_steps(WARM_UP_STEPS + number * EVERY_STEPS)
        most = max(most, 1000 * len(nodes))
    run.close()
    del kept
    assert most <= num_alive + 4 * size
    gc.collect()
    assert not nodes


def test_a_collection_leaves_tuples_alone_that_other_threads_are_building() -> None:
    """The data feed's threads build them all the time, and so may the user's."""
    run = CollectBetweenSteps()
    run.begin_epoch(0)
    is_over = False

    def build() -> None:
        while not is_over:
            tuple(item for item in range(5))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            building = [threads.submit(build) for _ in range(2)]
            try:
                for number in range(30):
                    kept = [[i] for i in range(3000)]
                    gc.collect(1)  # they become old
                    run.between_steps(WARM_UP_STEPS + number * EVERY_STEPS)
                    del kept
            finally:
                is_over = True
            for each in building:
                each.result()
    finally:
        sys.setswitchinterval(interval)
        run.close()


def leave_at_the_end(trainer: pl.Trainer) -> None:
    for epoch in trainer.epochs(1):
        for batch in epoch:
            take_step(trainer, batch)


def leave_by_break(trainer: pl.Trainer) -> None:
    for epoch in trainer.epochs(1):
        for batch in epoch:
            take_step(trainer, batch)
            if trainer.position.step > WARM_UP_STEPS + 3:
                break


def leave_by_an_error(trainer: pl.Trainer) -> None:
    for epoch in trainer.epochs(1):
        for batch in epoch:
            take_step(trainer, batch)
            if trainer.position.step > WARM_UP_STEPS + 3:
                raise RuntimeError("of the user")


def leave_the_iterator_lying_about(trainer: pl.Trainer) -> None:
    batches = iter(next(trainer.epochs(1)))
    for _ in range(WARM_UP_STEPS + 3):
        take_step(trainer, next(batches))
    LYING_ABOUT.append(batches)


LYING_ABOUT: list[Any] = []


@pytest.mark.parametrize("leave", [leave_at_the_end, leave_by_break, leave_by_an_error, leave_the_iterator_lying_about])
def test_the_users_settings_come_back_however_the_run_ends(leave: Callable[[pl.Trainer], None]) -> None:
    with thresholds(600, 9, 8):
        before = state()
        during = []
        is_error = leave is leave_by_an_error
        expected = pytest.raises(RuntimeError, match="of the user") if is_error else nullcontext()
        with expected, trainer_over(WARM_UP_STEPS + 10) as trainer:
            trainer.every(1, lambda _: during.append(state()))
            leave(trainer)
        assert state() == before
        LYING_ABOUT.clear()
        assert state() == before
    assert during[0] == before
    is_enabled, (young, middle, old), is_frozen = during[-1]
    assert (is_enabled, young, middle) == (True, 600, 9)
    assert old > 8
    assert is_frozen


def test_between_epochs_python_collects_as_usual() -> None:
    usual = gc.get_threshold()
    with trainer_over(WARM_UP_STEPS + 5) as trainer:
        for epoch in trainer.epochs(3):
            for batch in epoch:
                take_step(trainer, batch)
                if epoch.number:
                    assert gc.get_threshold() != usual
            assert gc.get_threshold() == usual


def test_a_disabled_collector_stays_disabled_and_is_not_called() -> None:
    gc.disable()
    try:
        before = state()
        with trainer_over(WARM_UP_STEPS + 5) as trainer, full_collections(lambda: trainer.position.step) as steps:
            leave_at_the_end(trainer)
            assert state() == before
        assert not steps
    finally:
        gc.enable()


def test_a_collector_that_the_user_disables_in_mid_run_rests_until_it_is_enabled_again() -> None:
    kept = []
    with (
        thresholds(*EAGER),
        trainer_over(NUM_STEPS) as trainer,
        full_collections(lambda: trainer.position.step) as steps,
    ):
        try:
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    if trainer.position.step == EVERY_STEPS - 5:
                        gc.disable()
                    if trainer.position.step == EVERY_STEPS + 5:
                        gc.enable()
                    if trainer.position.step >= WARM_UP_STEPS:
                        kept.append([[i] for i in range(2500)])
                    take_step(trainer, batch)
        finally:
            gc.enable()
        assert [step for step in steps if WARM_UP_STEPS <= step < NUM_STEPS] == [WARM_UP_STEPS, 2 * EVERY_STEPS]


def test_a_program_that_has_frozen_objects_itself_is_left_alone() -> None:
    gc.collect()
    gc.freeze()
    try:
        before, num_frozen = state(), gc.get_freeze_count()
        with trainer_over(WARM_UP_STEPS + 5) as trainer:
            leave_at_the_end(trainer)
            assert state() == before
        assert state() == before
        assert gc.get_freeze_count() < num_frozen + FROZEN_BY_PYTHON  # nothing was added to it
    finally:
        gc.unfreeze()


def test_thresholds_that_the_user_sets_in_mid_run_are_kept() -> None:
    with thresholds(*gc.get_threshold()):
        with trainer_over(WARM_UP_STEPS + 5) as trainer:
            trainer.every(WARM_UP_STEPS + 2, lambda _: gc.set_threshold(777, 7, 7))
            leave_at_the_end(trainer)
        assert gc.get_threshold() == (777, 7, 7)


def test_of_two_trainers_the_last_to_close_restores() -> None:
    before = state()
    with trainer_over(WARM_UP_STEPS + 10) as outer:
        with trainer_over(WARM_UP_STEPS + 10) as inner:
            for outer_epoch, inner_epoch in zip(outer.epochs(1), inner.epochs(1), strict=True):
                for first, second in zip(outer_epoch, inner_epoch, strict=True):
                    take_step(outer, first)
                    take_step(inner, second)
        assert gc.get_threshold() == before[1]
        assert is_anything_frozen()
    assert state() == before


def test_a_trainer_closed_while_another_is_in_its_epoch_changes_nothing_for_it() -> None:
    before = state()
    with trainer_over(WARM_UP_STEPS + 10) as outer:
        for epoch in outer.epochs(1):
            for batch in epoch:
                take_step(outer, batch)
                if outer.position.step == WARM_UP_STEPS + 5:
                    during = gc.get_threshold()
                    with trainer_over(WARM_UP_STEPS + 5) as inner:
                        leave_at_the_end(inner)
                    assert gc.get_threshold() == during != before[1]
                    assert is_anything_frozen()
    assert state() == before


def test_a_collection_may_free_an_object_that_closes_a_run() -> None:
    class Holder(Node):
        def __del__(self) -> None:
            other.close()
            closed.append(True)

    closed: list[bool] = []
    run, other = CollectBetweenSteps(), CollectBetweenSteps()
    before = state()
    for each in (run, other):
        each.begin_epoch(0)
    other.between_steps(WARM_UP_STEPS)
    Holder()
    run.between_steps(WARM_UP_STEPS)
    assert closed
    run.close()
    assert state() == before


def test_a_forked_reader_has_the_usual_thresholds() -> None:
    usual = gc.get_threshold()
    run = CollectBetweenSteps()
    run.begin_epoch(0)
    run.between_steps(WARM_UP_STEPS)
    assert gc.get_threshold() != usual
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os._exit(0 if gc.get_threshold() == usual else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run.close()


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="garbage_collection='never' is unknown: choose 'between steps' or 'as usual'"):
        trainer_over(4, garbage_collection="never")
