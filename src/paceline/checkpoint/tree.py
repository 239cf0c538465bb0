"""State trees of checkpoints: `core.tree`, whose errors are here those of a damaged checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.checkpoint.errors import CheckpointError
from paceline.core import tree
from paceline.core.tree import MAX_DEPTH as MAX_DEPTH
from paceline.core.tree import Flat as Flat
from paceline.core.tree import flatten as flatten


def unflatten(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that `flatten` took apart. A structure it cannot have written is a CheckpointError."""
    try:
        return tree.unflatten(structure, tensors)
    except tree.StructureError as error:
        raise CheckpointError(str(error)) from None
