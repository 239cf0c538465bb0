"""Lines on stderr about a run."""

from __future__ import annotations

import sys
from contextlib import suppress


def notice(text: str) -> None:
    """Print a line on stderr. Never raises: a full disk, or a reader that has ended, must not end a run."""
    with suppress(OSError, ValueError):  # ValueError: the stream is closed
        print(f"paceline: {text}", file=sys.stderr, flush=True)
