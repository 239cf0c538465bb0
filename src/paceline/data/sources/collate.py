"""Collation of samples into a micro-batch, with errors that name the samples that do not fit together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from paceline.data.errors import UserCode
from paceline.data.rows import count_rows


class Pair(NamedTuple):
    """A micro-batch of inputs and targets."""

    x: Any
    y: Any


class Read(NamedTuple):
    """A micro-batch that was read: the batch (None if no sample is left), its number of samples, and the samples that
    were skipped as bad. `exists`: False beyond the end of a stream."""

    batch: Any
    num_samples: int
    skipped: tuple[Any, ...] = ()
    exists: bool = True


def collate(samples: list[Any]) -> Any:
    """torch's default collation; pairs become a `Pair`."""
    batch = default_collate(samples)
    return as_pair(batch) if type(samples[0]) in (list, tuple) else batch


def as_pair(batch: Any) -> Any:
    """A plain pair as a `Pair`; any other batch unchanged."""
    return Pair._make(batch) if type(batch) in (list, tuple) and len(batch) == 2 else batch


def counted(batch: Any, samples: Sequence[Any], *, is_weighed: bool) -> Read:
    """The result of a user's collate function on these samples. It may leave samples out, even all of them."""
    if batch is not None and (num_rows := len(samples) if is_weighed else count_rows(batch, samples)):
        return Read(batch, num_rows)
    warnings.warn("collate_fn left no sample of a micro-batch: the step continues without it", stacklevel=2)
    return Read(None, 0)


def join(collate: Callable[[list[Any]], Any], samples: list[Any], indices: Sequence[int]) -> Any:
    """The samples as one micro-batch. If `collate` fails because shapes differ, the error names two such samples."""
    with UserCode("joining samples {} of the data set to a micro-batch", indices):
        try:
            return collate(samples)
        except Exception as error:
            if isinstance(error, StopIteration) or (problem := _problem(samples, indices)) is None:
                raise
            raise ValueError(problem) from error


def _problem(samples: Sequence[Any], indices: Sequence[int]) -> str | None:
    for index, sample in zip(indices, samples, strict=True):
        if sample is None:
            return (
                f"sample {index} of the data set is None, which cannot be joined to a micro-batch: return a sample, "
                "give a collate_fn that leaves None out, or raise an error in the data set and set "
                "skip_bad_samples=True"
            )
    mismatch = _mismatch(samples, indices)
    return mismatch and f"{mismatch}: make all samples the same shape, or give a collate_fn that pads them"


def _mismatch(samples: Sequence[Any], indices: Sequence[int], where: str = "") -> str | None:
    """The first place inside nested samples where shapes differ."""
    first = samples[0]
    is_sequence = isinstance(first, Sequence) and not isinstance(first, str | bytes)
    if isinstance(first, torch.Tensor | np.ndarray) or is_sequence:
        shapes = [_shape(sample) for sample in samples]
        for index, shape in zip(indices, shapes, strict=True):
            if shape != shapes[0]:
                return (
                    f"samples {indices[0]} and {index} do not fit into one micro-batch: their shapes{where} are "
                    f"{shapes[0]} and {shape}"
                )
    parts: list[tuple[str, list[Any]]] = []
    if isinstance(first, Mapping):
        keys = [key for key in first if all(isinstance(s, Mapping) and key in s for s in samples)]
        parts = [(f" of {key!r}", [sample[key] for sample in samples]) for key in keys]
    elif isinstance(first, list | tuple):
        parts = [(f" of item {i}", [sample[i] for sample in samples]) for i in range(len(first))]
    found = (_mismatch(values, indices, f"{name}{where}") for name, values in parts)
    return next(filter(None, found), None)


def _shape(sample: Any) -> tuple[int, ...]:
    if isinstance(sample, torch.Tensor | np.ndarray):
        return tuple(sample.shape)
    return (len(sample),) if isinstance(sample, Sequence) else ()
