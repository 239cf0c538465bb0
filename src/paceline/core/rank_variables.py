"""The environment variables of a worker, as torchrun sets them. Imports no torch, for launchers."""

from __future__ import annotations

import os
from collections.abc import Mapping

# The file of the rendezvous store for workers of one host, in the launcher's private folder.
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


def is_worker(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher started this process as a worker."""
    return {"RANK", "WORLD_SIZE"} <= (os.environ if environment is None else environment).keys()
