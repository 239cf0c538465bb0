"""Environment variables that tune glibc's allocator in the processes that Paceline starts.

A training step on the CPU frees its activations and gradients, and the next step allocates the same amount. By default
glibc returns freed memory to the kernel, and the next step gets it back page by page, cleared, 4 KB at a time. With the
settings below the process keeps freed memory, in pages of 2 MB if the kernel provides them on request.

glibc reads its variables when a program starts. `launch` therefore sets them for the process that workers are forked
from; `paceline run` and `paceline train` set them and execute themselves again. The allocator of a process that
Paceline did not start is never changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

SWITCH = "PACELINE_HUGE_PAGES"  # "0" turns all of it off
VARIABLE = "GLIBC_TUNABLES"
TUNABLES = {
    "glibc.malloc.hugetlb": 1,  # madvise(MADV_HUGEPAGE), if the kernel's mode is "madvise"
    "glibc.malloc.mmap_threshold": 32 << 20,  # the largest legal value: allocations up to 32 MB come from the heap
    "glibc.malloc.trim_threshold": 2 << 30,  # return memory to the kernel only beyond 2 GB of free memory
}


def allocator_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables to add to `environment` before a process starts. Empty if the user has set the allocator up."""
    given = environment.get(VARIABLE, "")
    is_chosen = "glibc.malloc" in given or any(name.startswith("MALLOC_") for name in environment)
    if is_chosen or environment.get(SWITCH) == "0":
        return {}
    return {VARIABLE: ":".join([*filter(None, [given]), *(f"{name}={value}" for name, value in TUNABLES.items())])}


def restart_with_allocator_settings() -> None:
    """Execute this command again with the variables set, unless they are: same process id, arguments and streams."""
    is_command = Path(sys.argv[0]).name in ("paceline", "__main__.py")  # not a program that calls the command's main
    if is_command and (variables := allocator_environment()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **variables})
