"""What a worker tells the user in one message: where in Paceline a mistake was noticed helps nobody to mend it.

A worker's error reaches the command as text, with its traceback; `told` finds the message in it.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paceline
from paceline.checkpoint.errors import CheckpointError
from paceline.core.errors import WorkerError
from paceline.run.saving.resuming import NoProgressError

_PACKAGE = Path(paceline.__file__).parent


class Told(NoProgressError):
    """Why the run failed, complete without a traceback. To start the workers again would not help."""


class Mistake(Told):
    """The project is wrong, which was noticed before anything was trained."""


@contextmanager
def noticing_mistakes() -> Iterator[None]:
    """While a run is put together: what Paceline itself refuses becomes a `Mistake`.

    Errors inside of the user's code, and those that nobody raised on purpose, stay as they are.
    """
    try:
        yield
    except (ValueError, TypeError, ModuleNotFoundError, CheckpointError) as error:
        if _is_raised_by_us(error):
            raise Mistake(str(error)) from error
        raise


def told(error: WorkerError | Told) -> Told | None:
    """What a worker told, whether it was this process or another; None for an error that needs its traceback."""
    if isinstance(error, Told):
        return error
    for kind in (Mistake, Told):
        _, found, message = error.traceback_text.rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")
        if found:
            return kind(message.rstrip())
    return None


def _is_raised_by_us(error: Exception) -> bool:
    """Whether a `raise` of Paceline's is where it began."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0)
    return Path(frame.filename).is_relative_to(_PACKAGE) and line.lstrip().startswith("raise ")
