"""The host's tensors on huge pages.

A step walks through all weights, optimizer state, activations and gradients, and a core remembers where it found only
some thousand pages of 4 KB: it spends a hundredth of forward and backward, and an eighth of the optimizer's step, on
looking up the others. Where Linux gives out pages of 2 MB on request, the heap's free end is requested to have them. It
is made long enough for that first, which takes addresses but no memory.

PACELINE_HUGE_PAGES=0 leaves the heap as it is.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

from paceline.run import freed_memory

logger = logging.getLogger("paceline")

SWITCH = "PACELINE_HUGE_PAGES"
HEAP_BYTES = 1 << 30  # of a larger one, the rest stays on small pages

_BLOCK_BYTES = 31 << 20  # larger ones would not come from the heap
_MADV_HUGEPAGE = 14
_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_MAPS = Path("/proc/self/maps")


@cache
def use_huge_pages() -> None:
    """From now on what this process allocates is on huge pages; where that cannot be, the log says why.

    After `keep_freed_memory`, without which the heap would be cut off again.
    """
    reason = obstacle() or _lengthen_heap()
    if reason is not None:
        logger.info("tensors on the host are on small pages: %s", reason)


def obstacle() -> str | None:
    """Why huge pages are not requested; None if they can be."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if (reason := freed_memory.obstacle()) is not None:
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
