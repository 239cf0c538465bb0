"""What workers note of their steps, in files that outlive them, and what a loss of one cost by these notes."""

from __future__ import annotations

import bisect
import itertools
import math
import os
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_FORM = struct.Struct("6d")
_PREFIX = "steps-"


class Note(NamedTuple):
    """One step of one worker. Times are those of the machine's monotonic clock.

    `world` grows whenever the workers change; `size` is their number. A step that was not `completed` was dropped:
    its samples are not trained. `step` counts completed steps.
    """

    time_s: float
    step: int
    world: int
    size: int
    num_samples: int
    completed: bool


class StepLog:
    """The notes of this worker."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / f"{_PREFIX}{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, step: int, world: int, size: int, num_samples: int, *, completed: bool = True) -> None:
        os.write(self._file, _FORM.pack(time.monotonic(), step, world, size, num_samples, completed))


class WorkerNotes:
    """The notes of another worker, which may still be writing."""

    def __init__(self, path: Path) -> None:
        self.pid = int(path.name.removeprefix(_PREFIX))
        self._path = path

    @classmethod
    def of_all(cls, folder: Path) -> list[WorkerNotes]:
        return [cls(path) for path in sorted(folder.glob(f"{_PREFIX}*"))]

    def all(self) -> list[Note]:
        content = self._path.read_bytes()
        return [_note(fields) for fields in _FORM.iter_unpack(content[: len(content) // _FORM.size * _FORM.size])]

    def from_end(self, number: int) -> Note | None:
        """The last one is number 1."""
        with self._path.open("rb") as file:
            count = os.fstat(file.fileno()).st_size // _FORM.size
            if count < number:
                return None
            file.seek((count - number) * _FORM.size)
            return _note(_FORM.unpack(file.read(_FORM.size)))

    @property
    def is_alive(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False


def _note(fields: tuple[float, ...]) -> Note:
    time_s, step, world, size, num_samples, completed = fields
    return Note(time_s, int(step), int(world), int(size), int(num_samples), bool(completed))


@dataclass(frozen=True)
class Kill:
    """When a worker was lost, and the world it was in."""

    time_s: float
    world: int


@dataclass(frozen=True)
class Cost:
    """What the loss of a worker cost. `seconds`: to the end of the first step without it, beyond a normal step."""

    seconds: float
    num_repeated: int  # steps that were completed before, and again by all who are left
    num_dropped: int  # steps whose samples were given up
    num_untrained: int  # samples, of these and of the steps with fewer workers than there should be


def costs(kills: Sequence[Kill], notes: Sequence[Sequence[Note]], global_batch: int) -> list[Cost]:
    """From the notes of all workers, one list each."""
    bounds_s = [-math.inf, *(kill.time_s for kill in kills), math.inf]
    usual = NormalSteps(notes)
    found = []
    for kill, before_s, next_s in zip(kills, bounds_s, bounds_s[2:], strict=False):
        around = [_between(own, before_s, next_s) for own in notes]
        found.append(_cost(kill, around, usual, global_batch))
    return found


def _between(own: Sequence[Note], since_s: float, until_s: float) -> Sequence[Note]:
    first, last = (bisect.bisect_right(own, bound_s, key=lambda note: note.time_s) for bound_s in (since_s, until_s))
    return own[first:last]


def _cost(kill: Kill, notes: Sequence[Sequence[Note]], usual: NormalSteps, global_batch: int) -> Cost:
    after = [n for own in notes for n in own if n.time_s > kill.time_s]
    first = min((n for n in after if n.completed and n.world > kill.world), key=lambda n: n.time_s)
    done = max((n.step for own in notes for n in own if n.completed and n.world <= kill.world), default=0)
    repeated = [step for step in range(first.step, done + 1) if not any(_keeps(own, step, kill.world) for own in notes)]
    # All workers drop a step together, but for the one that is gone.
    num_dropped = max(sum(n.time_s > kill.time_s and not n.completed for n in own) for own in notes)
    trained = {n.step: n.num_samples for n in after if n.completed}
    num_missing = sum(global_batch - num_samples for num_samples in trained.values())
    return Cost(
        first.time_s - kill.time_s - usual.seconds(first.size),
        len(repeated),
        num_dropped,
        num_missing + num_dropped * global_batch,
    )


def _keeps(own: Sequence[Note], step: int, world: int) -> bool:
    """Whether a worker has completed a step in this world or before, and goes on with a later one in the next."""
    is_done = any(n.completed and n.step == step and n.world <= world for n in own)
    return is_done and min((n.step for n in own if n.completed and n.world > world), default=0) > step


class NormalSteps:
    """The median times of undisturbed steps, by the number of workers."""

    def __init__(self, notes: Sequence[Sequence[Note]]) -> None:
        by_size: dict[int, list[float]] = {}
        for own in notes:
            for before, after in itertools.pairwise(own):
                if before.completed and after.completed and before.world == after.world:
                    by_size.setdefault(after.size, []).append(after.time_s - before.time_s)
        self._medians = {size: statistics.median(own) for size, own in by_size.items()}

    def seconds(self, size: int) -> float:
        """Of the next smaller or larger number of workers where there was none of that."""
        nearest = min(self._medians, key=lambda known: abs(known - size), default=None)
        return 0.0 if nearest is None else self._medians[nearest]
