"""The environment variables that tell a worker its rank, as torchrun sets them. Here, without torch: launchers ask."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Names the file through which the workers of one host find each other, in their launcher's private folder.
STORE_VARIABLE = "PACELINE_STORE"


def is_worker(environment: Mapping[str, str] | None = None) -> bool:
    """Whether somebody started this process as a worker of a world."""
    return {"RANK", "WORLD_SIZE"} <= (os.environ if environment is None else environment).keys()
