"""Memory that tensors on the host free, kept for those of the next step.

The C library gives memory back to the system as soon as a few megabytes at the end of its heap are free, and asks for
it again, page by page and cleared, when the next tensor comes. A step frees all its activations and gradients and makes
as many in the next: it would spend up to a twentieth of its time on that.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache

logger = logging.getLogger("paceline")

# The settings of mallopt(3), and their largest values: what is larger than the first has pages of its own in any case.
_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD = -3, 32 << 20
_M_TRIM_THRESHOLD, _MAX_TRIM_THRESHOLD = -1, 2**31 - 1


@cache
def keep_freed_memory() -> None:
    """From now on this process gives back only what it has free beyond 2 GB; where that cannot be, the log says why.

    There is no way back, since the C library does not tell what it does otherwise.
    """
    if (reason := obstacle()) is not None:
        logger.info("freed memory is not kept for the next step: %s", reason)
        return
    mallopt = ctypes.CDLL(None).mallopt
    # In this order: a limit on what is given back keeps the other limit, which grows by itself, where it is.
    if mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD):
        mallopt(_M_TRIM_THRESHOLD, _MAX_TRIM_THRESHOLD)


def obstacle() -> str | None:
    """Why the C library is left as it is; None if it can be told. What its user has chosen stays."""
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return "this system's C library is not glibc"
    for name, value in os.environ.items():
        if name.startswith("MALLOC_") or (name == "GLIBC_TUNABLES" and "glibc.malloc" in value):
            return f"{name}={value} says how to handle it"
    return None
