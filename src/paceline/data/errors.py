"""Errors while samples are read, with the sample's number and file."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.errors import PacelineError


class SampleError(PacelineError):
    """A sample that cannot be read. `index`: its number in the source; `file`: its file; None if not known."""

    def __init__(self, message: str, *, index: int | None = None, file: str | None = None) -> None:
        super().__init__(message)
        self.index = index
        self.file = file


@contextmanager
def naming_sample(index: int, file: str) -> Iterator[None]:
    """Turns exceptions of the block into a `SampleError` that names the sample, except MemoryError."""
    try:
        yield
    except (SampleError, MemoryError):
        raise
    except Exception as error:
        text = f"sample {index} in {file} cannot be read: {type(error).__name__}: {error}"
        raise SampleError(text, index=index, file=file) from error


def picklable(error: BaseException, text: str) -> BaseException:
    """The error, or one with this text if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(text)
    return error


class UserCode:
    """Errors of the block get a note that says what it did, such as "reading sample {}", formatted with `values`.

    StopIteration becomes a `SampleError`: it would silently end a loop of the caller.
    """

    def __init__(self, what: str, *values: Any) -> None:
        self._what = what
        self._values = values

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, StopIteration):
            raise ended_by_stop_iteration(self._what.format(*self._values)) from error
        if error is not None:
            error.add_note(f"while {self._what.format(*self._values)}")


def ended_by_stop_iteration(what: str) -> SampleError:
    return SampleError(
        f"{what} raised StopIteration, which does not end an epoch: return a value, or raise another error (a next() "
        "in it may have run out: give it a default, or restart its iterator)"
    )


def check_range(indices: npt.NDArray[np.int64], length: int) -> None:
    """Every index must be a sample's number: NumPy would count negative ones from the end."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < length:
        raise IndexError(f"samples {indices.min()} to {indices.max()} are out of range: the source has {length}")


def suggestion(name: str, choices: Collection[str]) -> str:
    """The end of an error about an unknown name: the nearest known one, or all of them."""
    near = get_close_matches(name, choices, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(map(repr, choices))}"
