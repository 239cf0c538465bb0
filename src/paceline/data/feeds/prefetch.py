"""Reading ahead: what this worker will most likely need next, a bounded number of micro-batches of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import Any

from paceline.data.feeds.readers import Readers


class Prefetcher:
    """Keeps at most `depth` requests under way. Told something else than it expected, it reads what is asked for."""

    def __init__(self, readers: Readers, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"prefetch={depth}: choose how many micro-batches to read ahead, at least 1")
        self._readers = readers
        self._depth = depth
        self._under_way: dict[Hashable, Callable[[], Any]] = {}

    def expect(self, upcoming: Iterable[Hashable]) -> None:
        """What will be taken next, in order; what was expected before and is not among it is given up."""
        wanted = list(islice(upcoming, self._depth))
        for request in self._under_way.keys() - set(wanted):
            del self._under_way[request]
        for request in wanted:
            if request not in self._under_way:
                self._under_way[request] = self._readers.submit(request)

    def take(self, request: Hashable) -> Any:
        answer = self._under_way.pop(request, None) or self._readers.submit(request)
        return answer()

    def close(self) -> None:
        self._under_way.clear()
        self._readers.close()
