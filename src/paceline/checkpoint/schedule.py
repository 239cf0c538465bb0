"""When to save. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """A point between two steps: how many steps and epochs are done, and the seconds a clock of the worker's shows."""

    step: int
    epoch: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """Save every so many steps, minutes or epochs, whichever comes first, and at the end of the run.

    Steps and epochs are counted from the start of the run, not from the last save: a run that was resumed saves at
    the steps at which it would have.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    every_epochs: int | None = None
    final: bool = True

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_epochs"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r} is not a positive integer: choose {name} >= 1 or None")
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise ValueError(f"every_minutes={self.every_minutes!r} is no time: choose minutes > 0 or None")

    def is_due_by_count(self, now: Moment, last: Moment) -> bool:
        """Whether a multiple of steps or epochs was reached since the last save. The same on every worker.

        `last` is the moment of the last save, or of the start or resumption of the run.
        """
        return _passed(self.every_steps, last.step, now.step) or _passed(self.every_epochs, last.epoch, now.epoch)

    def is_due_by_clock(self, now: Moment, last: Moment) -> bool:
        """Whether the minutes are over. Clocks differ: rank 0 decides, and tells the others in the step's exchange."""
        return self.every_minutes is not None and now.seconds - last.seconds >= 60 * self.every_minutes

    def is_due_at_end(self, now: Moment, last: Moment) -> bool:
        """Whether the run, which ends now, has something left to save. The same on every worker."""
        return self.final and now.step > last.step


def _passed(interval: int | None, last: int, now: int) -> bool:
    return interval is not None and now // interval > last // interval
