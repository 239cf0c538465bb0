"""Training without the samples that cannot be read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.data.errors import SampleError, picklable
from paceline.data.feeds.sharded import Request, reader_of
from paceline.data.sources.base import Indices, Read, SeededSource, Source, WrappedData

# The first samples that a process reads: if all of these are bad, the fault is not in single samples.
MAX_FIRST_BAD = 64


@dataclass(frozen=True)
class Skipped:
    """A sample that was skipped. `file` is None if the source does not know it."""

    index: int
    file: str | None
    error: Exception

    def __reduce__(self) -> tuple[Any, ...]:
        text = f"{type(self.error).__name__}: {self.error}"
        return Skipped, (self.index, self.file, picklable(self.error, text))


class SkipBad(WrappedData):
    """Wraps a source whose samples may fail: a micro-batch comes without its failing samples, and is smaller.

    A sample is bad if reading it alone fails, so this must not depend on its neighbours. Samples that can be read but
    do not fit together are still an error, and so is a source of which the first samples are all bad: its code is at
    fault. If a sample fails always or never, what `read` returns depends on its arguments alone.

    Args:
        source: any source. A micro-batch without bad samples costs nothing extra; one with bad samples is read again.
        on_skip: called in the worker with each bad sample, every time it is met. By default there is a warning.
    """

    counts_samples = True

    def __init__(self, source: Source, on_skip: Callable[[Skipped], None] | None = None) -> None:
        self._data = source
        self._on_skip = on_skip or _warn
        self._has_read_any = False
        self._num_first_bad = 0

    def with_seed(self, seed: int) -> SkipBad:
        return SkipBad(self._data.with_seed(seed), self._on_skip) if isinstance(self._data, SeededSource) else self

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        """The good samples as one micro-batch; None if there are none."""
        read = self.read_counted(indices, epoch, position, is_weighed=True)
        self.report_skipped(read.skipped)
        return read.batch

    def read_counted(self, indices: Indices, epoch: int, position: int, *, is_weighed: bool = False) -> Read:
        """The good samples, how many they are, and the bad ones, which are not reported here."""
        read = reader_of(self._data, is_weighed=is_weighed)
        try:
            found = read(Request(epoch, position, len(indices), indices))
            self._has_read_any = True
            return found
        except MemoryError:
            raise
        except Exception:
            # If no sample is bad alone, the read below raises the same error again.
            bad = self._find_bad(indices, epoch, position)
        good = indices[~np.isin(indices, list(bad))]
        if len(good):
            self._has_read_any = True
            return read(Request(epoch, position, len(good), good))._replace(skipped=tuple(bad.values()))
        self._refuse_bad_only(bad)
        return Read(None, 0, skipped=tuple(bad.values()))

    def _refuse_bad_only(self, bad: dict[int, Skipped]) -> None:
        """Otherwise a mistake in a data set or collate_fn would end in a run that trains nothing."""
        self._num_first_bad += len(bad)
        if not self._has_read_any and self._num_first_bad >= MAX_FIRST_BAD:
            *_, last = bad.values()
            raise SampleError(
                f"the first {self._num_first_bad} samples that were read are all bad, sample {last.index} by "
                f"{type(last.error).__name__}: {last.error}: check the code of the data set and its collate_fn",
                index=last.index,
                file=last.file,
            ) from last.error

    def report_skipped(self, skipped: Sequence[Skipped]) -> None:
        for one in skipped:
            self._on_skip(one)

    def _find_bad(self, indices: Indices, epoch: int, position: int) -> dict[int, Skipped]:
        bad: dict[int, Skipped] = {}
        for index in dict.fromkeys(indices.tolist()):
            try:
                self._data.read(np.array([index], np.int64), epoch, position)
            except MemoryError:
                raise
            except Exception as error:
                bad[index] = Skipped(index, error.file if isinstance(error, SampleError) else None, error)
        return bad


def _warn(skipped: Skipped) -> None:
    place = "" if skipped.file is None else f" in {skipped.file}"
    warnings.warn(f"sample {skipped.index}{place} was skipped: {skipped.error}", stacklevel=2)
