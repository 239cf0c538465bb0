"""Going on without the samples that cannot be read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.data.fingerprint import Facts, facts_of
from paceline.data.sources.base import CountedSource, Indices, Read, Source


@dataclass(frozen=True)
class Skipped:
    """A sample that was left out. `file` is None where the source does not know it."""

    index: int
    file: str | None
    error: Exception


class SkipBad:
    """A source whose samples may fail: those that do are left out, and their micro-batch gets smaller.

    Whether a sample is bad is found by reading it alone, so it must not depend on its neighbours. Samples that read
    well but do not fit together are an error still. As long as a sample fails always or never, what `read` returns
    depends on its arguments alone.

    Args:
        source: any source; a micro-batch without a bad sample costs nothing extra, one with is read again in parts.
        on_skip: called in the worker for each bad sample whenever it is met. Without it there is a warning for each.
    """

    def __init__(self, source: Source, on_skip: Callable[[Skipped], None] | None = None) -> None:
        self._source = source
        self._on_skip = on_skip or _warn
        self.counts_samples = True

    def __len__(self) -> int:
        return len(self._source)

    def fingerprint(self) -> Facts:
        return facts_of(self._source)

    def with_seed(self, seed: int) -> SkipBad:
        """This source for a run with that seed."""
        with_seed = getattr(self._source, "with_seed", None)
        return self if with_seed is None else SkipBad(with_seed(seed), self._on_skip)

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        """The good samples as one micro-batch; None if there are none."""
        read = self.read_counted(indices, epoch, position, is_weighed=True)
        self.tell(read.skipped)
        return read.batch

    def read_counted(self, indices: Indices, epoch: int, position: int, *, is_weighed: bool = False) -> Read:
        """What `read` gives, how many samples it holds, and those left out, of which nobody was told yet."""
        try:
            return self._counted(indices, epoch, position, is_weighed=is_weighed)
        except MemoryError:
            raise
        except Exception:
            # Where none is bad by itself, reading them together fails again, which is the right error.
            bad = self._find_bad(indices, epoch, position)
        good = indices[~np.isin(indices, list(bad))]
        read = self._counted(good, epoch, position, is_weighed=is_weighed) if len(good) else Read(None, 0)
        return read._replace(skipped=tuple(bad.values()))

    def _counted(self, indices: Indices, epoch: int, position: int, *, is_weighed: bool) -> Read:
        source = self._source
        if isinstance(source, CountedSource) and source.counts_samples:
            return source.read_counted(indices, epoch, position, is_weighed=is_weighed)
        return Read(source.read(indices, epoch, position), len(indices))

    def tell(self, skipped: Sequence[Skipped]) -> None:
        """Pass on what was left out: called by the worker, wherever it was read."""
        for one in skipped:
            self._on_skip(one)

    def _find_bad(self, indices: Indices, epoch: int, position: int) -> dict[int, Skipped]:
        bad: dict[int, Skipped] = {}
        for index in dict.fromkeys(indices.tolist()):
            try:
                self._source.read(np.array([index], np.int64), epoch, position)
            except MemoryError:
                raise
            except Exception as error:
                bad[index] = Skipped(index, getattr(error, "file", None), error)
        return bad


def _warn(skipped: Skipped) -> None:
    place = "" if skipped.file is None else f" in {skipped.file}"
    warnings.warn(f"sample {skipped.index}{place} was skipped: {skipped.error}", stacklevel=2)
