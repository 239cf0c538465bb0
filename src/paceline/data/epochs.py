"""The epochs of data with numbered samples: which samples come in which order, and how they are cut.

The order is Paceline's own, a pure function of (seed, epoch), or that of a sampler of the user's, which rank 0 draws
when an epoch begins and gives to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import from_rank_0
from paceline.core.seeding import Purpose, derive_seed, host_randomness
from paceline.data.errors import ended_by_stop_iteration
from paceline.data.fingerprint import Facts, facts_of
from paceline.data.sources.base import Indices, Source
from paceline.plan.order import EpochOrder
from paceline.plan.steps import Position, Steps

# Epochs whose order is kept: the one that is trained, and the one that is read ahead.
KEPT = 2


@dataclass(slots=True, unsafe_hash=True)
class Request:
    """Samples to read as one batch, known by their place: an epoch has one order. `position` is that of the first."""

    epoch: int
    position: int
    num_samples: int
    indices: Indices = field(compare=False)


class Order(Protocol):
    """The samples of an epoch by their places."""

    def indices(self, start: int, stop: int) -> Indices: ...


class Epoch(Protocol):
    """An epoch's order and how it is cut. `steps` counts whatever is cut: samples, or batches that were given whole."""

    @property
    def steps(self) -> Steps: ...

    def request(self, first: int, count: int) -> Request:
        """The samples of `count` micro-batches from number `first` on."""

    def num_samples(self, first: int, count: int) -> int:
        """How many they are."""


class Epochs(Protocol):
    """The epochs of a run."""

    def begin(self, number: int) -> Epoch:
        """The epoch that the run is in. All workers ask for it together."""

    def known(self, number: int) -> Epoch | None:
        """The same without asking anybody; None where its order is not known before it begins."""


class CutEpoch:
    """An order that is cut into micro-batches of one size, the last of which may be smaller."""

    def __init__(self, number: int, order: Order, steps: Steps) -> None:
        self._number = number
        self._order = order
        self.steps = steps

    def request(self, first: int, count: int) -> Request:
        places = self.steps.sample_range(first, count)
        start, stop = places.start, places.stop
        return Request(self._number, start, stop - start, self._order.indices(start, stop))

    def num_samples(self, first: int, count: int) -> int:
        return len(self.steps.sample_range(first, count))


class BatchedEpoch:
    """Micro-batches of sizes of their own: `starts` has the place of each one's first sample, and the end."""

    def __init__(self, number: int, indices: Indices, starts: Sequence[int], steps: Steps) -> None:
        self._number = number
        self._indices = indices
        self._starts = starts
        self.steps = steps

    def request(self, first: int, count: int) -> Request:
        start, stop = self._starts[first], self._starts[first + count]
        return Request(self._number, start, stop - start, self._indices[start:stop])

    def num_samples(self, first: int, count: int) -> int:
        return self._starts[first + count] - self._starts[first]


class SeededEpochs:
    """Paceline's own order of `length` samples, of which `steps` says how many are visited."""

    def __init__(self, steps: Steps, length: int, *, seed: int, shuffle: bool) -> None:
        def epoch(number: int) -> CutEpoch:
            return CutEpoch(number, EpochOrder(length, seed=seed, epoch=number, shuffle=shuffle), steps)

        self._epoch: Callable[[int], CutEpoch] = lru_cache(KEPT)(epoch)

    def begin(self, number: int) -> Epoch:
        return self._epoch(number)

    def known(self, number: int) -> Epoch | None:
        return self._epoch(number)


@dataclass(frozen=True)
class Visited:
    """A source of whose samples an epoch visits `num_samples`: the first ones of its order."""

    source: Source
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def fingerprint(self) -> Facts:
        return facts_of(self.source)


@dataclass(frozen=True)
class Sampled:
    """A source whose order a sampler decides, seeded by (seed, epoch). It may give another number in every epoch.

    `in_batches`: it gives lists of indices, each of which is one micro-batch. `whole`: what does not fill a micro-batch
    of so many samples at the epoch's end is left out.
    """

    source: Source
    sampler: Iterable[Any]
    seed: int
    in_batches: bool = False
    whole: int = 1

    def __len__(self) -> int:
        """Samples, or batches, of an epoch; of the first, where the sampler does not know."""
        return self._length // self.whole * self.whole

    @cached_property
    def _length(self) -> int:
        try:
            return len(self.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return len(self.draw(0))

    def fingerprint(self) -> Facts:
        """With another sampler the data is another."""
        name, known = type(self.sampler).__name__, facts_of(self.sampler).get("content", "")
        return facts_of(self.source) | {"order": f"{name} {known}".strip()}

    def draw(self, epoch: int) -> list[Any]:
        """What the sampler gives for this epoch, whatever it gave before."""
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
        return drawn[: len(drawn) // self.whole * self.whole]


class DrawnEpochs:
    """The epochs of `Sampled` data: rank 0 draws each when it begins, and all workers get it."""

    def __init__(self, data: Sampled, steps: Steps, communicator: Communicator) -> None:
        self._data = data
        self._steps = steps
        self._communicator = communicator
        self._kept: dict[int, Epoch] = {}

    def begin(self, number: int) -> Epoch:
        if number not in self._kept:
            latest = list(self._kept.items())[1 - KEPT :]
            self._kept = dict([*latest, (number, self._agree(number))])
        return self._kept[number]

    def known(self, number: int) -> Epoch | None:
        return self._kept.get(number)

    def _agree(self, number: int) -> Epoch:
        sizes, indices = _checked(self._data, number) if self._communicator.world.is_main else (_NONE, _NONE)
        indices = self._from_rank_0(indices)
        if not self._data.in_batches:
            return CutEpoch(number, _Given(indices), replace(self._steps, num_samples=len(indices)))
        starts = list(accumulate(self._from_rank_0(sizes).tolist(), initial=0))
        return BatchedEpoch(number, indices, starts, replace(self._steps, num_samples=len(starts) - 1))

    def _from_rank_0(self, numbers: Indices) -> Indices:
        return np.frombuffer(bytearray(from_rank_0(numbers.tobytes(), self._communicator)), np.int64)


_NONE: Indices = np.empty(0, np.int64)


class _Given:
    def __init__(self, indices: Indices) -> None:
        self._indices = indices

    def indices(self, start: int, stop: int) -> Indices:
        return self._indices[start:stop]


NumberedData: TypeAlias = Source | Visited | Sampled


def source_of(data: NumberedData) -> Source:
    """What the samples are read from."""
    return data.source if isinstance(data, Visited | Sampled) else data


def epochs_of(data: NumberedData, steps: Steps, communicator: Communicator, *, seed: int, shuffle: bool) -> Epochs:
    """The epochs of a run over this data."""
    if isinstance(data, Sampled):
        return DrawnEpochs(data, steps, communicator)
    return SeededEpochs(steps, len(source_of(data)), seed=seed, shuffle=shuffle)


def num_left(epoch: Epoch, position: Position) -> int:
    """Micro-batches from there to the epoch's end: at least one, if the position was taken from this data."""
    num_micro_batches = epoch.steps.num_micro_batches
    if position.micro_batch >= num_micro_batches:
        raise ValueError(
            f"the run stands at micro-batch {position.micro_batch} of epoch {position.epoch}, which has "
            f"{num_micro_batches}: the data is shorter than it was; resume with the data the run was started with"
        )
    return num_micro_batches - position.micro_batch


def _nested(sampler: Any) -> Iterator[Any]:
    """A batch sampler draws from a sampler, which may draw from another."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _checked(data: Sampled, epoch: int) -> tuple[Indices, Indices]:
    """What the sampler gives: the sizes of its batches, where it gives any, and the indices one after another."""
    name, drawn = type(data.sampler).__name__, data.draw(epoch)
    sizes = [len(batch) for batch in drawn] if data.in_batches else []
    if not drawn or 0 in sizes:
        what = f"an empty batch {sizes.index(0)}" if drawn else "no samples"
        raise ValueError(f"{name} gave {what} in epoch {epoch}: there must be at least one sample")
    indices = np.asarray([index for batch in drawn for index in batch] if data.in_batches else drawn)
    length = len(data.source)
    is_good = indices.ndim == 1 and indices.dtype.kind in "iu"
    if not is_good or indices.min() < 0 or indices.max() >= length:
        shown = f"{indices.min()} to {indices.max()}" if is_good else repr(drawn[0])
        raise ValueError(
            f"{name} gave {shown} in epoch {epoch}: it must give the numbers of samples, from 0 to {length - 1}"
        )
    return np.asarray(sizes, np.int64), indices.astype(np.int64)
