"""Epochs of data with numbered samples: the order of the samples, and how it is cut into micro-batches.

The order is a pure function of (seed, epoch), or it comes from a user's sampler, which rank 0 draws at the start of
each epoch and sends to all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import from_rank_0
from paceline.core.generators import host_randomness
from paceline.core.seeding import Purpose, derive_seed
from paceline.data.errors import ended_by_stop_iteration
from paceline.data.fingerprint import Facts, facts_of
from paceline.data.sources.base import Indices, Source
from paceline.plan.order import EpochOrder
from paceline.plan.steps import Position, Steps

# The epoch in training, and the one that is read ahead.
_NUM_KEPT = 2


@dataclass(slots=True, unsafe_hash=True)
class Request:
    """Samples to read as one batch. `position` is the place of the first one in the epoch's order."""

    epoch: int
    position: int
    num_samples: int
    indices: Indices = field(compare=False)  # follow from the other fields


class EpochSamples:
    """The samples of one epoch in order, cut into micro-batches.

    Args:
        indices: returns the sample indices at positions start to stop of the order.
        steps: counts the units that are cut: samples, or the batches of a batch sampler.
        starts: for the batches of a batch sampler, the position of each one's first sample, and the end.
    """

    def __init__(
        self,
        number: int,
        indices: Callable[[int, int], Indices],
        steps: Steps,
        starts: Sequence[int] | None = None,
    ) -> None:
        self._number = number
        self._indices = indices
        self.steps = steps
        self._starts = starts

    def request(self, first: int, count: int) -> Request:
        """The samples of `count` micro-batches from number `first` on."""
        start, stop = self._range(first, count)
        return Request(self._number, start, stop - start, self._indices(start, stop))

    def num_samples(self, first: int, count: int) -> int:
        start, stop = self._range(first, count)
        return stop - start

    def num_left(self, position: Position) -> int:
        """Micro-batches from this position to the end of the epoch, at least one."""
        total = self.steps.num_micro_batches
        if position.micro_batch >= total:
            raise ValueError(
                f"the run is at micro-batch {position.micro_batch} of epoch {position.epoch}, which has only {total}: "
                "the data is shorter than before; resume with the data that the run was started with"
            )
        return total - position.micro_batch

    def _range(self, first: int, count: int) -> tuple[int, int]:
        if self._starts is not None:
            return self._starts[first], self._starts[first + count]
        positions = self.steps.sample_range(first, count)
        return positions.start, positions.stop


class NumberedEpochs:
    """The epochs of a run over data with numbered samples.

    `is_collective`: `make_epoch` communicates, so only `begin`, which all workers call together, may call it.
    """

    def __init__(self, make_epoch: Callable[[int], EpochSamples], *, is_collective: bool) -> None:
        self._make_epoch = make_epoch
        self._is_collective = is_collective
        self._kept: dict[int, EpochSamples] = {}

    def begin(self, number: int) -> EpochSamples:
        """The epoch that the run is in. All workers call this together."""
        epoch = self._kept.get(number)
        if epoch is None:
            epoch = self._make_epoch(number)
            self._kept = dict([*list(self._kept.items())[1 - _NUM_KEPT :], (number, epoch)])
        return epoch

    def known(self, number: int) -> EpochSamples | None:
        """The epoch, or None if its order is not known before it begins."""
        return self._kept.get(number) if self._is_collective else self.begin(number)

    def num_left(self, position: Position) -> int:
        """Micro-batches from there to the epoch's end; 0 if the epoch's order is not known yet."""
        epoch = self.known(position.epoch)
        return 0 if epoch is None else epoch.num_left(position)

    def after(self, position: Position, num_micro_batches: int) -> Position:
        return position.after_step(num_micro_batches, self._known(position.epoch).steps)

    def request(self, epoch: int, number: int) -> Request:
        """One micro-batch of an epoch that is known."""
        return self._known(epoch).request(number, 1)

    def _known(self, number: int) -> EpochSamples:
        epoch = self.known(number)
        assert epoch is not None, "steps are planned only in epochs whose order is known"
        return epoch


@dataclass(frozen=True)
class Truncated:
    """A source of which an epoch visits only the first `num_samples` samples of its order."""

    source: Source
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def fingerprint(self) -> Facts:
        return facts_of(self.source)


@dataclass(frozen=True)
class Sampled:
    """A source in the order of a sampler, seeded by (seed, epoch). The number of samples may differ between epochs.

    `in_batches`: the sampler yields lists of indices, each of which is one micro-batch. `multiple_of`: samples at the
    end of an epoch that do not fill a micro-batch of this size are dropped.
    """

    source: Source
    sampler: Iterable[Any]
    seed: int
    in_batches: bool = False
    multiple_of: int = 1

    def __len__(self) -> int:
        """Samples, or batches, of an epoch; of the first epoch if the sampler has no length."""
        return self._length // self.multiple_of * self.multiple_of

    @cached_property
    def _length(self) -> int:
        try:
            return len(self.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return len(self.draw(0))

    def fingerprint(self) -> Facts:
        name, known = type(self.sampler).__name__, facts_of(self.sampler).get("content", "")
        return facts_of(self.source) | {"order": f"{name} {known}".strip()}

    def draw(self, epoch: int) -> list[Any]:
        """What the sampler yields for this epoch, independent of earlier draws."""
        seed = derive_seed(self.seed, Purpose.ORDER, epoch)
        with host_randomness() as randomness:
            for sampler in _nested(self.sampler):
                generator = getattr(sampler, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(seed)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
            randomness.seed(seed)
            try:
                drawn = list(self.sampler)
            except StopIteration as error:
                name = type(self.sampler).__name__
                raise ended_by_stop_iteration(f"starting the sampler {name} in epoch {epoch}") from error
        return drawn[: len(drawn) // self.multiple_of * self.multiple_of]


NumberedData: TypeAlias = Source | Truncated | Sampled


def source_of(data: NumberedData) -> Source:
    """The source that the samples are read from."""
    return data.source if isinstance(data, Truncated | Sampled) else data


def seeded_epoch(number: int, steps: Steps, length: int, *, seed: int, shuffle: bool) -> EpochSamples:
    """An epoch in Paceline's own order of `length` samples, of which `steps` says how many are visited."""
    return EpochSamples(number, EpochOrder(length, seed=seed, epoch=number, shuffle=shuffle).indices, steps)


def epochs_of(
    data: NumberedData, steps: Steps, communicator: Communicator, *, seed: int, shuffle: bool
) -> NumberedEpochs:
    """The epochs of a run over this data."""
    if isinstance(data, Sampled):
        return NumberedEpochs(
            partial(_drawn_epoch, data=data, steps=steps, communicator=communicator), is_collective=True
        )
    make_epoch = partial(seeded_epoch, steps=steps, length=len(source_of(data)), seed=seed, shuffle=shuffle)
    return NumberedEpochs(make_epoch, is_collective=False)


def _drawn_epoch(number: int, data: Sampled, steps: Steps, communicator: Communicator) -> EpochSamples:
    """Rank 0 draws the order and sends it to all workers."""

    def broadcast(numbers: Indices) -> Indices:
        return np.frombuffer(bytearray(from_rank_0(numbers.tobytes(), communicator)), np.int64)

    nothing: Indices = np.empty(0, np.int64)
    sizes, indices = _checked_draw(data, number) if communicator.world.is_main else (nothing, nothing)
    indices, starts = broadcast(indices), None
    if data.in_batches:
        starts = list(accumulate(broadcast(sizes).tolist(), initial=0))
    length = len(indices) if starts is None else len(starts) - 1
    return EpochSamples(number, lambda start, stop: indices[start:stop], replace(steps, num_samples=length), starts)


def _checked_draw(data: Sampled, epoch: int) -> tuple[Indices, Indices]:
    """The sizes of the sampler's batches, if it yields batches, and all indices."""
    name, drawn = type(data.sampler).__name__, data.draw(epoch)
    sizes = [len(batch) for batch in drawn] if data.in_batches else []
    if not drawn or 0 in sizes:
        what = f"an empty batch {sizes.index(0)}" if drawn else "no samples"
        raise ValueError(f"{name} gave {what} in epoch {epoch}: it must give at least one sample")
    indices = np.asarray([index for batch in drawn for index in batch] if data.in_batches else drawn)
    length = len(data.source)
    is_valid = indices.ndim == 1 and indices.dtype.kind in "iu"
    if not is_valid or indices.min() < 0 or indices.max() >= length:
        shown = f"{indices.min()} to {indices.max()}" if is_valid else repr(drawn[0])
        raise ValueError(f"{name} gave {shown} in epoch {epoch}: it must give sample indices from 0 to {length - 1}")
    return np.asarray(sizes, np.int64), indices.astype(np.int64)


def _nested(sampler: Any) -> Iterator[Any]:
    """A batch sampler draws from a sampler, which may draw from another one."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)
