"""Throughput of a run, and how long each worker waits, between two reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from paceline.core.waiting import split_sync


@dataclass(frozen=True)
class Rates:
    """shares: micro-batches per worker. waiting: fraction of the time, 0 to 1, that each worker waited for others."""

    samples_per_s: float
    tokens_per_s: float | None
    shares: tuple[int, ...]
    waiting: tuple[float, ...]


class RateMeter:
    """Accumulates steps; `take` returns the rates since the previous `take`."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._reset()

    def _reset(self) -> None:
        self._start = monotonic()
        self._num_samples = 0
        self._num_tokens: float | None = None
        self._shares = [0] * self._num_workers
        self._waiting_s = [0.0] * self._num_workers

    def add(
        self, num_samples: int, shares: Sequence[int], sync_s: Sequence[float] = (), num_tokens: float | None = None
    ) -> None:
        """Add a step: each worker's micro-batches, and its seconds in the exchange (from `record.timings`)."""
        self._num_samples += num_samples
        if num_tokens is not None:
            self._num_tokens = (self._num_tokens or 0.0) + num_tokens
        _, waiting_s = split_sync(sync_s)
        self._shares = [total + share for total, share in zip(self._shares, shares, strict=True)]
        if waiting_s:
            self._waiting_s = [total + s for total, s in zip(self._waiting_s, waiting_s, strict=True)]

    def take(self) -> Rates:
        seconds = max(monotonic() - self._start, 1e-9)
        rates = Rates(
            samples_per_s=self._num_samples / seconds,
            tokens_per_s=None if self._num_tokens is None else self._num_tokens / seconds,
            shares=tuple(self._shares),
            waiting=tuple(min(waited_s / seconds, 1.0) for waited_s in self._waiting_s),
        )
        self._reset()
        return rates
