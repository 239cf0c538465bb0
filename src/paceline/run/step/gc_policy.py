"""Python's garbage collector, kept from stopping a worker in the middle of a step.

A full collection visits every object that can refer to others, about 0.1 us each: with a data set in Python lists that
is a fraction of a second, and since each worker's comes at a moment of its own, all the others wait for it too. Here
full collections come between two steps, on all workers at the same ones, and only if objects have become old since the
last. What survives a collection is set aside (`gc.freeze`), so that the next one visits only what is new, and takes
microseconds.

Nothing is kept for good. Young objects are collected as usual, at any time. What was set aside is looked at again when
Python's memory has doubled, so garbage takes at most as much of it as what lived. And a single step that makes millions
of objects is interrupted after all.
"""

from __future__ import annotations

import gc
import os
import sys
from threading import RLock
from typing import Literal, Protocol
from weakref import WeakSet

GarbageCollection = Literal["between steps", "as usual"]

WARM_UP_STEPS = 20  # until what is made once has been made: the optimizer's state, caches, compiled code
EVERY_STEPS = 50
_GROWTH = 2
# Python collects everything after so many collections of the middle generation. In a step, after so many times more:
# with Python's own thresholds that is once 7 million objects have come and stayed.
_PATIENCE = 100
_MAX_THRESHOLD = 2**31 - 1
# Python's own start may freeze some (375 in 3.12); a program's `gc.freeze` takes all there are, 100,000 with torch.
FROZEN_BY_PYTHON = 2000


class Collector(Protocol):
    """Decides when garbage is collected in one run."""

    def begin_epoch(self, step: int) -> None:
        """Steps are about to come; `step` of them are done."""

    def between_steps(self, step: int) -> None:
        """So many steps are done, and the next has not begun: the moment to collect."""

    def end_epoch(self) -> None:
        """Whatever comes now is no step. Safe to call twice."""

    def close(self) -> None:
        """The run is over: the process has its own settings back. Safe to call twice."""


class CollectAsUsual:
    """Whenever Python thinks fit."""

    def begin_epoch(self, step: int) -> None: ...

    def between_steps(self, step: int) -> None: ...

    def end_epoch(self) -> None: ...

    def close(self) -> None: ...


class CollectBetweenSteps:
    """After a warm-up, full collections come between steps, at the same ones on all workers.

    A program that has disabled the collector, or has called `gc.freeze` itself, knows what it wants: it is left alone.
    """

    def __init__(self) -> None:
        self._due: int | None = None
        self._is_warm = False

    def begin_epoch(self, step: int) -> None:
        if self._due is None:
            self._due = step + WARM_UP_STEPS
        _PROCESS.enter(self)

    def between_steps(self, step: int) -> None:
        assert self._due is not None
        if step < self._due:
            return
        # Not so many steps after the last: workers that joined at different times collect together.
        self._due = (step // EVERY_STEPS + 1) * EVERY_STEPS
        if _PROCESS.is_frozen_by_user():
            self._due = sys.maxsize
        elif not self._is_warm or may_be_garbage():
            self._is_warm = True
            _PROCESS.collect(self)

    def end_epoch(self) -> None:
        _PROCESS.leave(self)

    def close(self) -> None:
        _PROCESS.release(self)


def may_be_garbage() -> bool:
    """Whether any object has become old since the last full collection: younger ones Python itself looks at.

    A full collection is not free where it finds nothing: it also empties the lists from which Python takes new objects.
    """
    has_generations = sys.version_info < (3, 14)
    return not has_generations or gc.get_count()[2] > 0


def collector_for(garbage_collection: GarbageCollection) -> Collector:
    return CollectBetweenSteps() if garbage_collection == "between steps" else CollectAsUsual()


class _Process:
    """The one collector that all runs of this process share."""

    def __init__(self) -> None:
        # Reentrant, since a collection may end a run: by the finalizer of the user's object that holds it.
        self._lock = RLock()
        self._runs: WeakSet[CollectBetweenSteps] = WeakSet()  # that are warm
        self._inside: WeakSet[CollectBetweenSteps] = WeakSet()  # those of them that are inside an epoch
        self._usual: tuple[int, int, int] | None = None  # the user's thresholds, while ours are set
        self._has_frozen = False
        self._num_alive = 0  # blocks of memory, when all of them were last looked at

    def is_frozen_by_user(self) -> bool:
        return not self._has_frozen and gc.get_freeze_count() > FROZEN_BY_PYTHON

    def collect(self, run: CollectBetweenSteps) -> None:
        """Collect now, for a run that is warm and inside an epoch; not while the user has the collector disabled."""
        with self._lock:
            if gc.isenabled() and gc.get_threshold()[0]:
                self._runs.add(run)
                self.enter(run)
                self._collect()

    def enter(self, run: CollectBetweenSteps) -> None:
        """Automatic full collections stop, once the run is warm."""
        with self._lock:
            if run not in self._runs:
                return
            self._inside.add(run)
            if self._usual is None:
                self._usual = gc.get_threshold()
                gc.set_threshold(*_patient(self._usual))

    def leave(self, run: CollectBetweenSteps) -> None:
        """They may come again, unless another run is inside an epoch."""
        with self._lock:
            self._inside.discard(run)
            if not self._inside:
                self.restore_thresholds()

    def release(self, run: CollectBetweenSteps) -> None:
        """Forget the run; with the last one nothing stays set aside."""
        with self._lock:
            self.leave(run)
            was_warm = run in self._runs
            self._runs.discard(run)
            if was_warm and not self._runs:
                gc.unfreeze()
                self._has_frozen = False
                self._num_alive = 0

    def restore_thresholds(self) -> None:
        if self._usual is None:
            return
        if gc.get_threshold() == _patient(self._usual):  # otherwise they are ones that the user has set since
            gc.set_threshold(*self._usual)
        self._usual = None

    def _collect(self) -> None:
        # Not counted by `gc.get_objects`: its list holds each tuple that another thread is just building, and there
        # Python gives up on it ("bad argument to internal function"). `gc.get_freeze_count` visits all that is frozen.
        looks_at_all = sys.getallocatedblocks() >= _GROWTH * self._num_alive
        if looks_at_all:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._has_frozen = True
        if looks_at_all:
            self._num_alive = sys.getallocatedblocks()


def _patient(usual: tuple[int, int, int]) -> tuple[int, int, int]:
    young, middle, old = usual
    return young, middle, min(max(old, 1) * _PATIENCE, _MAX_THRESHOLD)


_PROCESS = _Process()


def _start_anew_in_child() -> None:
    """A forked reader takes no steps. What was set aside stays so: untouched, its memory is shared."""
    global _PROCESS
    _PROCESS.restore_thresholds()
    _PROCESS = _Process()


os.register_at_fork(after_in_child=_start_anew_in_child)
