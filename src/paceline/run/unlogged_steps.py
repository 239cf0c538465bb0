"""The steps of a run since its last line of metrics."""

from __future__ import annotations

import math

from paceline.core.deferred import DeferredReader
from paceline.observe.rates import RateMeter, Rates
from paceline.run.step.record import StepRecord

# Records are read after at most this many steps. By then, their numbers have arrived from a GPU.
MAX_UNREAD_STEPS = 64


class UnloggedSteps:
    """Adds up records for the next line of metrics. Reading a record waits for a GPU, so it is deferred."""

    def __init__(self, num_workers: int, *, has_tokens: bool) -> None:
        self._has_tokens = has_tokens
        self._unread = DeferredReader(self._read, MAX_UNREAD_STEPS // 2, batch=MAX_UNREAD_STEPS // 2)
        self._meter = RateMeter(num_workers)
        self._num_samples = 0
        self.newest: StepRecord | None = None

    def add(self, record: StepRecord) -> None:
        self._unread.add(record)
        self.newest = record

    def take_rates(self) -> Rates:
        """Since the last call."""
        self._unread.flush()
        return self._meter.take()

    def take_num_samples(self) -> int:
        """Since the last call."""
        self._unread.flush()
        num_samples, self._num_samples = self._num_samples, 0
        return num_samples

    def clear(self) -> None:
        """Forget the steps, which were logged."""
        self.take_rates()
        self.take_num_samples()

    def _read(self, record: StepRecord) -> None:
        self._num_samples += record.num_samples
        num_tokens = known(record.weight) if self._has_tokens else None
        self._meter.add(record.num_samples, record.shares, record.timings, num_tokens)


def known(number: float) -> float | None:
    """None for NaN: with averaging, loss and weight are unknown before the first average."""
    return None if math.isnan(number) else number
