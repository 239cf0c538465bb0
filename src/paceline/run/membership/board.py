"""A file of words that an agent and its workers map: the agent's announcements and each worker's activity.

Reading and writing a word takes less than a microsecond, so workers do it in every step. Each word has one writer.
Imports no torch, for launchers.

    newest      the number of the newest generation
    intact      generations below this number have lost a member: their exchanges never complete
    slot rows   the worker's activity, a count of its changes, its completed steps, the generation it is in
"""

from __future__ import annotations

import mmap
from enum import IntEnum
from pathlib import Path

from paceline.run.membership.generation import Generation

_NEWEST, _INTACT = range(2)
_HEADER_WORDS, _ROW_WORDS = 8, 8  # a cache line each
_ACTIVITY, _TICKS, _STEPS, _ENTERED = range(4)  # _ENTERED: a generation's number + 1


class Activity(IntEnum):
    """What a worker is doing. Only COMPUTING has a time limit: from the arrival of a micro-batch's data to its end."""

    SETTING_UP = 0
    READY = 1  # waiting to join the run
    COMPUTING = 2
    WAITING = 3  # for other workers
    ELSEWHERE = 4  # in a hook, in an evaluation, between epochs, or waiting for data or a disk


class Board:
    """The mapped file. The agent creates it with `create`; workers open it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = memoryview(mmap.mmap(file.fileno(), 0))
        self._words = self._memory.cast("Q")

    @classmethod
    def create(cls, path: Path, num_slots: int) -> Board:
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes(bytes(8 * (_HEADER_WORDS + num_slots * _ROW_WORDS)))
        unfinished.replace(path)  # after it has its size
        return cls(path)

    def announce(self, generation: Generation) -> None:
        """Called by the agent."""
        if generation.is_urgent:
            self._words[_INTACT] = generation.number
        self._words[_NEWEST] = generation.number

    @property
    def newest(self) -> int:
        return self._words[_NEWEST]

    @property
    def intact(self) -> int:
        return self._words[_INTACT]

    def row(self, slot: int) -> Row:
        start = _HEADER_WORDS + slot * _ROW_WORDS
        return Row(self._words[start : start + _ROW_WORDS])


class Row:
    """The words of one worker. No other process writes them, but for `clear`."""

    __slots__ = ("_words",)

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def enter(self, activity: int) -> None:
        """Begin an `Activity`."""
        words = self._words
        words[_TICKS] += 1
        words[_ACTIVITY] = activity

    def note_steps(self, num_steps: int) -> None:
        self._words[_STEPS] = num_steps

    def note_entered(self, generation: Generation) -> None:
        self._words[_ENTERED] = generation.number + 1

    def note_outside(self) -> None:
        """The worker waits to join, possibly again."""
        self._words[_ENTERED] = 0

    def clear(self) -> None:
        """Called by the agent, before it starts a replacement."""
        for word in range(_ROW_WORDS):
            self._words[word] = 0

    @property
    def activity(self) -> Activity:
        return Activity(self._words[_ACTIVITY])

    @property
    def num_ticks(self) -> int:
        return self._words[_TICKS]

    @property
    def num_steps(self) -> int:
        return self._words[_STEPS]

    @property
    def entered(self) -> int:
        """The generation in which the worker can continue after a loss; -1 while it is in none."""
        return self._words[_ENTERED] - 1
