"""Errors of a worker that the command shows as one message, without a traceback.

A worker's error reaches the command as the text of its traceback; `user_facing` finds the message in it.
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paceline
from paceline.checkpoint.errors import CheckpointError
from paceline.core.errors import PacelineError, WorkerError
from paceline.run.saving.resuming import NoProgressError

# Remedies in the library's errors that name Python arguments, and the corresponding options of the command.
_COMMAND_WORDS = (
    (r"list in allow=\[\.\.\.\] those that may differ", "name those that may differ: --allow NAME,NAME"),
    (r"(?:set|add it to) skip=\[\.\.\.\]", "use --skip NAME"),
    (r"(?:set|add it to) skip=\[([^\]]*)\]", r"use --skip \1"),
    (r"\ballow=\[([^\]]*)\]", r"--allow \1"),
    (r"set resume='auto' to continue", "use --resume to continue"),
    (r"start with resume='auto'", "start it without --resume"),
    (r"set resume=PATH", "use --resume PATH"),
)
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


def in_command_words(text: str) -> str:
    """An error with the options of the command instead of Python's arguments."""
    for pattern, words in _COMMAND_WORDS:
        text = re.sub(pattern, lambda match: match.expand(words).replace("'", "").replace(", ", ","), text)  # noqa: B023
    return text
