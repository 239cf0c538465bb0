"""The order of samples in an epoch: Paceline's own, or that of a user's sampler.

Paceline's is a pure function of (seed, epoch). Rank 0 draws a sampler's order at the start of each epoch and sends it
to all workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import from_rank_0
from paceline.core.generators import host_randomness
from paceline.core.seeding import Purpose, derive_seed
from paceline.data.errors import UserCode
from paceline.data.feeds.sharded import Epoch, Epochs
from paceline.data.fingerprint import Facts, facts_of
from paceline.data.sources.base import Indices, Source
from paceline.plan.epoch import EpochOrder, Steps

# What a sampler yields is converted in blocks: a list of all indices would take several times an array's memory.
_BLOCK = 4096


@dataclass(frozen=True)
class Ordered:
    """A source whose epochs follow a sampler, or leave out samples at their end.

    Args:
        sampler: seeded by (seed, epoch). The number of samples may differ between epochs. None: Paceline's own order.
        in_batches: the sampler yields lists of indices, each of which is one micro-batch.
        multiple_of: samples at the end of an epoch that do not fill a micro-batch of this size are dropped.
    """

    source: Source
    sampler: Iterable[Any] | None = None
    seed: int = 0
    in_batches: bool = False
    multiple_of: int = 1

    def __len__(self) -> int:
        """Samples, or batches, of an epoch; of the first epoch if the sampler has no length."""
        return self.num_drawn // self.multiple_of * self.multiple_of

    @cached_property
    def num_drawn(self) -> int:
        """Samples, or batches, before some are left out."""
        try:
            return len(self.source if self.sampler is None else self.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            sizes, indices = self.draw(0)
            return len(sizes if self.in_batches else indices)

    def fingerprint(self) -> Facts:
        facts = facts_of(self.source)
        if self.sampler is None:
            return facts
        known = facts_of(self.sampler).get("content", "")
        return facts | {"order": f"{type(self.sampler).__name__} {known}".strip()}

    def draw(self, epoch: int) -> tuple[Indices, Indices]:
        """The sizes of the sampler's batches, if it yields batches, and all indices; independent of earlier draws."""
        assert self.sampler is not None
        seed, name = derive_seed(self.seed, Purpose.ORDER, epoch), type(self.sampler).__name__
        sizes, blocks = list[int](), list[npt.NDArray[Any]]()
        with host_randomness() as randomness:
            sampler: Any = self.sampler
            while sampler is not None:  # a batch sampler draws from a sampler, which may draw from another one
                if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
                    generator.manual_seed(seed)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
                sampler = getattr(sampler, "sampler", None)
            randomness.seed(seed)
            with UserCode("drawing from the sampler {} in epoch {}", name, epoch):
                iterator = iter(self.sampler)
                while drawn := list(islice(iterator, _BLOCK)):
                    if self.in_batches:
                        sizes += map(len, drawn)
                        drawn = list(chain.from_iterable(drawn))
                    blocks.append(np.asarray(drawn))
        return np.asarray(sizes, np.int64), self._checked(blocks, sizes, f"{name} gave", f"in epoch {epoch}: it must")

    def _checked(self, blocks: list[npt.NDArray[Any]], sizes: list[int], gave: str, must: str) -> Indices:
        """All indices, except those that drop_last leaves out."""
        if not blocks or 0 in sizes:
            what = f"an empty batch {sizes.index(0)}" if blocks else "no samples"
            raise ValueError(f"{gave} {what} {must} give at least one sample")
        length, indices = len(self.source), np.concatenate(blocks)
        is_valid = indices.ndim == 1 and indices.dtype.kind in "iu"
        if not is_valid or indices.min() < 0 or indices.max() >= length:
            shown = f"{indices.min()} to {indices.max()}" if is_valid else repr(indices.tolist()[0])
            raise ValueError(f"{gave} {shown} {must} give sample indices from 0 to {length - 1}")
        num_used = len(indices) // self.multiple_of * self.multiple_of
        if not num_used:
            raise ValueError(
                f"{gave} {len(indices)} samples {must} give at least the {self.multiple_of} of a batch, since the "
                "DataLoader's drop_last=True leaves out a smaller one"
            )
        return indices[:num_used].astype(np.int64, copy=False)


NumberedData: TypeAlias = Source | Ordered


def source_of(data: NumberedData) -> Source:
    """The source that the samples are read from."""
    return data.source if isinstance(data, Ordered) else data


def seeded_epoch(number: int, steps: Steps, length: int, *, seed: int, shuffle: bool) -> Epoch:
    """An epoch in Paceline's own order of `length` samples, of which `steps` says how many are visited."""
    return Epoch(number, EpochOrder(length, seed=seed, epoch=number, shuffle=shuffle).indices, steps)


def epochs_of(data: NumberedData, steps: Steps, communicator: Communicator, *, seed: int, shuffle: bool) -> Epochs:
    """The epochs of a run over this data."""
    if isinstance(data, Ordered) and data.sampler is not None:
        sampled = data
        return Epochs(lambda number: _drawn_epoch(number, sampled, steps, communicator), is_collective=True)
    length = len(source_of(data))
    return Epochs(lambda number: seeded_epoch(number, steps, length, seed=seed, shuffle=shuffle))


def _drawn_epoch(number: int, data: Ordered, steps: Steps, communicator: Communicator) -> Epoch:
    """Rank 0 draws the order and sends it to all workers."""

    def broadcast(numbers: Indices) -> Indices:
        if communicator.world.size == 1:
            return numbers
        return np.frombuffer(bytearray(from_rank_0(numbers.tobytes(), communicator)), np.int64)

    nothing: Indices = np.empty(0, np.int64)
    sizes, indices = data.draw(number) if communicator.world.is_main else (nothing, nothing)
    indices, starts = broadcast(indices), None
    if data.in_batches:
        starts = list(accumulate(broadcast(sizes).tolist(), initial=0))
    length = len(indices) if starts is None else len(starts) - 1
    return Epoch(number, lambda start, stop: indices[start:stop], replace(steps, num_samples=length), starts)
