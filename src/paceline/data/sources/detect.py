"""Data that is a source already, or is made one by its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.data.sources.base import Source
from paceline.data.sources.hf import hf_source, is_hf_dataset


def ready_source(data: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> Source | None:
    """The source for a `Source` object or an HF data set, drawing by `seed`; None for anything else."""
    if is_hf_dataset(data):
        return hf_source(data, collate_fn, seed)
    # A data set of the user's may have a method `read` too: it has items as well.
    if not hasattr(data, "read") or not hasattr(data, "__len__") or hasattr(data, "__getitem__"):
        return None
    if collate_fn is not None:
        raise ValueError(
            f"collate_fn joins samples, but data is a {type(data).__name__}, which gives whole micro-batches: "
            "give collate_fn to the source, if it takes one"
        )
    with_seed = getattr(data, "with_seed", None)
    source: Source = data if with_seed is None else with_seed(seed)
    return source
