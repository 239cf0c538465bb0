"""The environment variables that tell a worker its rank, as torchrun sets them. Here, without torch: launchers ask."""

from __future__ import annotations

import os
from collections.abc import Mapping


def is_worker(environment: Mapping[str, str] | None = None) -> bool:
    """Whether somebody started this process as a worker of a world."""
    return {"RANK", "WORLD_SIZE"} <= (os.environ if environment is None else environment).keys()
