"""What goes wrong while samples are read, with the sample's number and file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import numpy as np
import numpy.typing as npt

from paceline.core.errors import PacelineError


class SampleError(PacelineError):
    """A sample that cannot be read. `index` is its number in the source, `file` where it lies, None if not known."""

    def __init__(self, message: str, *, index: int | None = None, file: str | None = None) -> None:
        super().__init__(message)
        self.index = index
        self.file = file


@contextmanager
def naming_sample(index: int, file: str | None = None) -> Iterator[None]:
    """Whatever the block raises becomes a `SampleError` that names the sample; lack of memory is not its fault."""
    try:
        yield
    except (SampleError, MemoryError):
        raise
    except Exception as error:
        place = "" if file is None else f" in {file}"
        raise SampleError(
            f"sample {index}{place} cannot be read: {type(error).__name__}: {error}", index=index, file=file
        ) from error


def ended_by_stop_iteration(what: str) -> SampleError:
    """For code of the user's that raises StopIteration: passed on, it would end whatever loop is outside of it."""
    return SampleError(
        f"{what} raised StopIteration, which means the end of an iteration and not that of an epoch: return "
        "something, or raise another error (a next() in it may have run out: give it a default, or start it again)"
    )


def check_range(indices: npt.NDArray[np.int64], length: int) -> None:
    """Every index is a sample's number: NumPy would take negative ones from the end."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < length:
        raise IndexError(f"samples {indices.min()} to {indices.max()} are not all among the {length} of the source")


def suggestion(name: str, choices: Collection[str]) -> str:
    """How an error about an unknown name ends: the nearest known one, or all of them."""
    near = get_close_matches(name, choices, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(map(repr, choices))}"
