"""Errors of a worker that the command shows as one message, without a traceback.

A worker's error reaches the command as the text of its traceback; `user_facing` finds the message in it.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paceline
from paceline.checkpoint.errors import CheckpointError
from paceline.core.errors import PacelineError, WorkerError
from paceline.run.saving.resuming import NoProgressError

_PACKAGE = Path(paceline.__file__).parent


class UserFacingError(NoProgressError):
    """An error whose message is complete without a traceback. Restarting the workers would not help."""


class ProjectError(UserFacingError):
    """An error in the project, found before training started."""


@contextmanager
def reporting_project_errors() -> Iterator[None]:
    """While a run is set up: errors that Paceline itself raises become `ProjectError`.

    Errors inside the user's code, and errors that no `raise` of Paceline caused, stay as they are.
    """
    try:
        yield
    except (ValueError, TypeError, ModuleNotFoundError, CheckpointError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = linecache.getline(frame.filename, frame.lineno or 0)
        if Path(frame.filename).is_relative_to(_PACKAGE) and line.lstrip().startswith("raise "):
            raise ProjectError(str(error)) from error
        raise


def user_facing(error: PacelineError) -> UserFacingError | None:
    """The user-facing error of a worker in this or another process; None if the traceback is needed."""
    if isinstance(error, UserFacingError):
        return error
    text = error.traceback_text if isinstance(error, WorkerError) else ""
    for kind in (ProjectError, UserFacingError):
        _, found, message = text.rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")
        if found:
            return kind(message.rstrip())
    return None
