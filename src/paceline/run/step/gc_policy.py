"""Keeps full garbage collections out of a step.

A full collection visits every Python object that can refer to others, about 0.1 us each: 0.2 s for a data set in Python
lists, while all other workers wait. So inside an epoch Python's automatic full collections are postponed, and one runs
between two steps, every EVERY_STEPS steps. Objects that exist when training starts are frozen, which costs nothing and
keeps them out of these collections. Young objects are collected as usual.
"""

from __future__ import annotations

import gc
from typing import ClassVar

from paceline.run.settings import GarbageCollection

EVERY_STEPS = 200
# Postponed, not disabled: a step that creates millions of objects is still collected, and so is a forked reader.
POSTPONED = 100
# Python 3.12 freezes a few hundred objects at startup. More than this means that the program called gc.freeze().
FROZEN_BY_PYTHON = 2000


class GcPolicy:
    """The collector's settings during one run's epochs; `close` restores the user's.

    A program that disabled the collector, or froze objects itself, is left alone.
    """

    _inside: ClassVar[list[GcPolicy]] = []  # runs of this process that are inside an epoch
    _frozen_by: ClassVar[list[GcPolicy]] = []
    _usual: ClassVar[tuple[int, int, int]] = (0, 0, 0)

    def __init__(self, garbage_collection: GarbageCollection) -> None:
        self._is_enabled = garbage_collection == "between steps"

    def begin_epoch(self) -> None:
        if not self._is_enabled or not gc.isenabled() or not gc.get_threshold()[0]:
            return
        if self not in self._frozen_by and (self._frozen_by or gc.get_freeze_count() <= FROZEN_BY_PYTHON):
            gc.freeze()
            self._frozen_by.append(self)
        if not self._inside:
            young, middle, old = GcPolicy._usual = gc.get_threshold()
            gc.set_threshold(young, middle, old * POSTPONED)
        self._inside.append(self)

    def collect(self) -> None:
        """Called between two steps, every EVERY_STEPS: a full collection, if any object became old since the last."""
        if self in self._inside and gc.isenabled() and gc.get_count()[2]:
            gc.collect()

    def end_epoch(self) -> None:
        if self in self._inside:
            self._inside.remove(self)
            young, middle, old = self._usual
            if not self._inside and gc.get_threshold() == (young, middle, old * POSTPONED):
                gc.set_threshold(young, middle, old)

    def close(self) -> None:
        self.end_epoch()
        if self in self._frozen_by:
            self._frozen_by.remove(self)
            if not self._frozen_by:
                gc.unfreeze()
