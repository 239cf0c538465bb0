"""Sources that draw random numbers."""

from __future__ import annotations

from copy import copy
from typing import Self


class Seeded:
    """Draws by a seed of its own where it was given one, else by the run's."""

    def __init__(self, seed: int | None) -> None:
        self._own_seed = seed
        self._seed = 0 if seed is None else seed

    def with_seed(self, seed: int) -> Self:
        """This source for a run with that seed; a seed given when it was made stays."""
        if self._own_seed is not None:
            return self
        twin = copy(self)
        twin._seed = seed
        return twin
