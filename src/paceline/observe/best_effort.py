"""Outputs that must not end a run: metrics, events, timelines, loggers, the terminal."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from typing import Any, Generic, TextIO, TypeVar

logger = logging.getLogger("paceline")

T = TypeVar("T")


def warn(text: str) -> None:
    """Emit a warning. Never raises: if warnings are errors, the text is logged instead."""
    try:
        warnings.warn(text, stacklevel=2)
    except Warning:
        logger.warning(text)


def describe(error: BaseException) -> str:
    """The type and the message of an error."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def attempt(name: str | PathLike[str]) -> Iterator[None]:
    """Write something once. An exception in the block becomes a warning that names the output."""
    try:
        yield
    except Exception as error:
        _warn_unwritten(name, error)


class BestEffort(Generic[T]):
    """An output whose failures do not end the run.

    The first failure is a warning with the output's name and the error. Every `use` tries again, so an output recovers
    when the disk has space again. `close` warns if records were lost.

    open_output: creates the object that `use` passes on; called immediately, and by each `use` until it succeeds.
    """

    def __init__(self, name: PathLike[str], open_output: Callable[[], T], close_output: Callable[[T], object]) -> None:
        self._name = name
        self._open_output, self._close_output = open_output, close_output
        self._output: T | None = None
        self._num_used = self._num_lost = 0
        self._has_warned = self._is_closed = False
        self._try(lambda _: None)

    def use(self, action: Callable[[T], object]) -> None:
        """Write one record. A no-op after `close`."""
        if not self._is_closed:
            self._num_used += 1
            self._num_lost += not self._try(action)

    def close(self) -> None:
        """Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._output is not None:
            self._try(self._close_output)
        if self._num_lost:
            warn(f"{self._name}: {self._num_lost} of {self._num_used} records were lost")

    def _try(self, action: Callable[[T], object]) -> bool:
        try:
            if self._output is None:
                self._output = self._open_output()
            action(self._output)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                _warn_unwritten(self._name, error)
            return False
        return True


class SafeStream:
    """A text stream whose failures do not end the run: after the first one, writing is a no-op.

    Characters that the stream's encoding lacks are written as escapes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        shown = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        self._try(lambda stream: stream.write(shown))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def isatty(self) -> bool:
        with suppress(ValueError):  # the stream is closed
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream failed")
        return self._stream.fileno()

    def _try(self, action: Callable[[TextIO], Any]) -> None:
        if self._stream is None:
            return
        try:
            action(self._stream)
        except (OSError, ValueError) as error:
            self._stream = None
            warn(f"progress can no longer be shown, training continues: {describe(error)}")


def _warn_unwritten(name: str | PathLike[str], error: Exception) -> None:
    warn(f"{name} cannot be written, training continues: {describe(error)}")
