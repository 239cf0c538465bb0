"""Memory of tensors on the host: kept for the next step when it is freed, and on huge pages.

The C library gives memory back to the system as soon as a few megabytes at the end of its heap are free, and asks for
it again, page by page and cleared, when the next tensor comes. A step frees all its activations and gradients and makes
as many in the next: it would spend up to a twentieth of its time on that.

A step walks through all of them, and through weights and optimizer state, and a core remembers where it found only some
thousand pages of 4 KB: it spends a hundredth of forward and backward, and an eighth of the optimizer's step, on looking
up the others. Where Linux gives out pages of 2 MB on request, the heap's free end is requested to have them. It is made
long enough for that first, which takes addresses but no memory. PACELINE_HUGE_PAGES=0 leaves it as it is.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

logger = logging.getLogger("paceline")

# The settings of mallopt(3), and their largest values: what is larger than the first has pages of its own in any case.
_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD = -3, 32 << 20
_M_TRIM_THRESHOLD, _MAX_TRIM_THRESHOLD = -1, 2**31 - 1

SWITCH = "PACELINE_HUGE_PAGES"
HEAP_BYTES = 1 << 30  # of a larger one, the rest stays on small pages

_BLOCK_BYTES = 31 << 20  # larger ones would not come from the heap
_MADV_HUGEPAGE = 14
_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_MAPS = Path("/proc/self/maps")


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


@cache
def use_huge_pages() -> None:
    """From now on what this process allocates is on huge pages; where that cannot be, the log says why.

    After `keep_freed_memory`, without which the heap would be cut off again.
    """
    reason = huge_pages_obstacle() or _lengthen_heap()
    if reason is not None:
        logger.info("huge pages are not requested for tensors on the host: %s", reason)


def huge_pages_obstacle() -> str | None:
    """Why huge pages are not requested; None if they can be."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if (reason := obstacle()) is not None:
        return reason
    try:
        mode, overcommit = _MODE.read_text(), _OVERCOMMIT.read_text()
    except OSError as error:
        return f"{error.filename} cannot be read"
    if "[madvise]" not in mode:  # with `always` there is nothing to ask for
        return f"{_MODE} says {mode.strip()}"
    if overcommit.strip() == "2":
        return f"{_OVERCOMMIT} is 2, so addresses count as memory"
    return None


def heap() -> range:
    """The addresses of this process's heap; empty if it has none."""
    for line in _MAPS.read_text().splitlines():
        if line.endswith("[heap]"):
            first, _, stop = line.partition(" ")[0].partition("-")
            return range(int(first, 16), int(stop, 16))
    return range(0)


def _lengthen_heap() -> str | None:
    """Why it failed; None if it did not."""
    library = ctypes.CDLL(None, use_errno=True)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = [library.malloc(_BLOCK_BYTES) for _ in range(HEAP_BYTES // _BLOCK_BYTES)]
    for block in blocks:
        library.free(block)
    addresses = heap()
    if len(addresses) < HEAP_BYTES // 2:
        return f"the heap has {len(addresses) >> 20} MB and does not grow"
    if library.madvise(addresses.start, len(addresses), _MADV_HUGEPAGE) != 0:
        return f"madvise: {os.strerror(ctypes.get_errno())}"
    return None
