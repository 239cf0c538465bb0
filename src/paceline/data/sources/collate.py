"""Joining samples to a micro-batch, with an explanation where they do not fit together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.data.errors import ended_by_stop_iteration


class Mismatch(NamedTuple):
    """Two samples, by their places in the micro-batch, that differ in shape somewhere inside."""

    place: int
    other: int
    where: str
    shape: tuple[int, ...]
    other_shape: tuple[int, ...]


def join(collate: Callable[[list[Any]], Any], samples: list[Any], indices: Sequence[int]) -> Any:
    """The samples as one micro-batch. Where `collate` fails because shapes differ, the error names them."""
    try:
        return collate(samples)
    except StopIteration as error:
        raise ended_by_stop_iteration(f"joining samples {list(indices)} of the data set to a micro-batch") from error
    except Exception as error:
        nothing = [index for index, sample in zip(indices, samples, strict=False) if sample is None]
        if nothing:
            raise ValueError(
                f"sample {nothing[0]} of the data set is None, which cannot be joined to a micro-batch: return a "
                "sample, give a collate_fn that leaves None out, or raise an error in the data set and set "
                "skip_bad_samples=True"
            ) from error
        mismatch = find_mismatch(samples)
        if mismatch is None:
            error.add_note(f"while joining samples {list(indices)} of the data set to a micro-batch")
            raise
        raise ValueError(
            f"samples {indices[mismatch.place]} and {indices[mismatch.other]} do not fit into one micro-batch: their "
            f"shapes{mismatch.where} are {mismatch.shape} and {mismatch.other_shape}: bring all samples to one shape, "
            "or give a collate_fn that pads them"
        ) from error


def find_mismatch(samples: Sequence[Any], where: str = "") -> Mismatch | None:
    """The first place inside nested samples where the shapes of two of them differ."""
    first = samples[0]
    if isinstance(first, torch.Tensor | np.ndarray) or (
        isinstance(first, Sequence) and not isinstance(first, str | bytes)
    ):
        shapes = [_shape(sample) for sample in samples]
        for other, shape in enumerate(shapes):
            if shape != shapes[0]:
                return Mismatch(0, other, where, shapes[0], shape)
    if isinstance(first, Mapping):
        keys = [key for key in first if all(isinstance(s, Mapping) and key in s for s in samples)]
        parts = [(f" of {key!r}", [sample[key] for sample in samples]) for key in keys]
    elif isinstance(first, list | tuple):
        parts = [(f" of item {i}", [sample[i] for sample in samples]) for i in range(len(first))]
    else:
        parts = []
    found = (find_mismatch(values, f"{name}{where}") for name, values in parts)
    return next((mismatch for mismatch in found if mismatch is not None), None)


def _shape(sample: Any) -> tuple[int, ...]:
    if isinstance(sample, torch.Tensor | np.ndarray):
        return tuple(sample.shape)
    return (len(sample),) if isinstance(sample, Sequence) else ()
