"""How fast a run goes between two moments at which somebody looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic


@dataclass(frozen=True)
class Rates:
    """Since the last look. `shares`: micro-batches per worker. `waiting`: the part of the time, 0 to 1, that each
    worker waited for slower ones."""

    samples_per_s: float
    tokens_per_s: float | None
    shares: tuple[int, ...]
    waiting: tuple[float, ...]


class RateMeter:
    """Adds up steps; `take` tells the rates and begins anew."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._shares: list[int] = []
        self._waiting_s: list[float] = []
        self._num_tokens: float | None = None
        self._begin()

    def add(
        self, num_samples: int, shares: Sequence[int], sync_s: Sequence[float] = (), num_tokens: float | None = None
    ) -> None:
        """A step: its samples, each worker's micro-batches and seconds in the exchange (as in `record.timings`)."""
        self._num_samples += num_samples
        if num_tokens is not None:
            self._num_tokens = (self._num_tokens or 0.0) + num_tokens
        self._shares = [total + share for total, share in zip(self._shares, shares, strict=True)]
        # Who comes last to an exchange waits for nobody: the rest of the others' time there is waiting.
        least_s = min(sync_s, default=0.0)
        self._waiting_s = [total + s - least_s for total, s in zip(self._waiting_s, sync_s or self._zeros, strict=True)]

    def take(self) -> Rates:
        seconds = max(monotonic() - self._began, 1e-9)
        rates = Rates(
            samples_per_s=self._num_samples / seconds,
            tokens_per_s=None if self._num_tokens is None else self._num_tokens / seconds,
            shares=tuple(self._shares),
            waiting=tuple(min(waited_s / seconds, 1.0) for waited_s in self._waiting_s),
        )
        self._begin()
        return rates

    @property
    def _zeros(self) -> list[float]:
        return [0.0] * self._num_workers

    def _begin(self) -> None:
        self._began = monotonic()
        self._num_samples = 0
        self._num_tokens = None
        self._shares = [0] * self._num_workers
        self._waiting_s = self._zeros
