"""A worker's environment variables, and child processes that end with their parent. Imports no torch, for launchers."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

# The folder of the rendezvous store for workers of one host, in the launcher's private folder.
STORE_VARIABLE = "PACELINE_STORE"
# Of workers that may change during a run: the folder with their board and generations, and which member this is.
MEMBERSHIP_VARIABLE = "PACELINE_MEMBERSHIP"
MEMBER_VARIABLE = "PACELINE_MEMBER"
# How many workers the run began with.
FIRST_SIZE_VARIABLE = "PACELINE_FIRST_SIZE"
# The worker's number for its agent, also in the names of files. It is its rank until the workers change.
NUMBER_VARIABLE = "PACELINE_WORKER"
# When the run was launched, as Unix time, the same on all nodes: workers that join later find the run's folder by it.
LAUNCHED_VARIABLE = "PACELINE_LAUNCHED"

_PR_SET_PDEATHSIG = 1


def is_worker(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher started this process as a worker."""
    return {"RANK", "WORLD_SIZE"} <= (os.environ if environment is None else environment).keys()


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends, in any way. Only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the line above
        os._exit(1)
